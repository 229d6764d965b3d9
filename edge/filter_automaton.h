/* filter_automaton: finds every occurrence of many byte strings in one pass over a text (Aho and Corasick,
 * "Efficient string matching", CACM 18(6), 1975). Immutable once made, so threads may share it. */
#ifndef TANDEM_EDGE_FILTER_AUTOMATON_H
#define TANDEM_EDGE_FILTER_AUTOMATON_H
#include "shared/base.h"
#include "shared/status.h"

#define AUTOMATON_BYTES_MAX (32u << 20) /* of all strings together */
#define AUTOMATON_NONE      UINT32_MAX

struct automaton;

/* automaton_create: strings are told apart by their index in words; of equal ones the smallest index counts.
 * words are borrowed for the call; none is empty. 0, -TD_ERR_ARG (an empty string), -TD_ERR_LIMIT, -TD_ERR_NOMEM. */
int automaton_create(const struct span *words, size_t count, struct automaton **out);
void automaton_destroy(struct automaton *a); /* wipes; a may be NULL */

/* automaton_step: the state after one more byte; a text begins in state 0. Amortised constant time. */
uint32_t automaton_step(const struct automaton *a, uint32_t state, uint8_t byte);

/* The states whose strings end here, the longest first: begin with automaton_match(a, state), go on with
 * automaton_next(a, match), until AUTOMATON_NONE. automaton_word: the index of a match's string. */
uint32_t automaton_match(const struct automaton *a, uint32_t state);
uint32_t automaton_next(const struct automaton *a, uint32_t match);
uint32_t automaton_word(const struct automaton *a, uint32_t match);

#endif
