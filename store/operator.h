/* operator: what the doors for operators have in common, the command on a stopped node's directory and the admin listener of a running one: the
 * same counts in the same shape, the same requests, and who may ask. */
#ifndef TANDEM_STORE_OPERATOR_H
#define TANDEM_STORE_OPERATOR_H
#include "store/store.h"
#include <jansson.h>

#define OPERATOR_TOKEN_SIZE   (2 * CRYPTO_KEY_SIZE)
#define OPERATOR_DEAD_PERCENT 50 /* compact: segments of which so much is dead, where nobody says otherwise */

/* The bearer token of the admin listener, derived from the master key: whoever can read that key may look after the store, and there is
 * no second secret to keep. */
void operator_token(const uint8_t master[CRYPTO_KEY_SIZE], char out[OPERATOR_TOKEN_SIZE + 1]);

/* Counts of the store and of each tenant; no ids, no text. The caller's; NULL without memory. */
json_t *operator_stats(struct store *s);

/* {"tenant", "block": 64 hex digits} or {"tenant", "principal", "conversation"}, and "pinned": true or false. Durable on return.
 * -TD_ERR_ARG, -TD_ERR_NOTFOUND (a conversation that is not there), or why it could not be written. */
int operator_pin(struct store *s, json_t *request, struct td_error *err);

#endif
