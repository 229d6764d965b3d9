/* model: what a store may answer after a crash, next to the store itself.
 *
 * For each id the model keeps the states that are allowed: that of the last acknowledged operation and of everything that was
 * asked for after it, acknowledged or not. Whatever a restarted store shows becomes the one allowed state: what was seen once, stays. */
#ifndef TANDEM_TESTS_MODEL_H
#define TANDEM_TESTS_MODEL_H
#include "../unit/store/store_fixture.h"
#include "sim_io.h"

#define MODEL_BLOCKS        20
#define MODEL_CONVERSATIONS 5
#define MODEL_HISTORY       512 /* operations of an id within one run of the store */

/* Of a block: number 0 absent, 1 present, as it was put or as demotion makes it; of a conversation: its text's number and version, 0 absent; a pin is
 * as a block. */
struct model_state {
    uint32_t number;
    uint64_t version;
};
struct model_op { /* what was asked for, and the answer */
    struct model_state state;
    int status; /* 1: none yet */
};
struct model_id {
    struct model_state base; /* allowed before any operation of this run */
    struct model_op ops[MODEL_HISTORY];
    size_t op_count;
};
struct model {
    struct model_id blocks[MODEL_BLOCKS], conversations[MODEL_CONVERSATIONS], pins[MODEL_BLOCKS];
    struct fixture_block content[MODEL_BLOCKS], demoted[MODEL_BLOCKS];
    uint32_t next_number;
    bool demotes;        /* some steps demote blocks */
    bool blocks_may_go;  /* eviction is on */
    char violation[160]; /* the first; "" = none */
    uint64_t acknowledged;
};

void model_init(struct model *m);
/* One random operation on the store. */
void model_step(struct model *m, struct store *s, struct sim *sim);
/* Everything that the store shows against what is allowed; the shown becomes the base of the next run. False when the machine
 * went off meanwhile, so that nothing can be said. */
bool model_check(struct model *m, struct store *s, const struct sim *sim);
/* Has none been set aside since this was asked last? */
bool model_index_is_true(const char *directory);
void model_violate(struct model *m, const char *what);

#endif
