/* known: what this node knows of a remote tier's blocks without asking: a table of fixed size, in RAM. An entry says that a block is there, that
 * it is not, or that the question is on its way; it is believed for a while only. Forgetting costs a question, believing wrongly a miss.
 *
 *   (nothing) -- ask --> ASKED -- answer --> THERE or ABSENT -- time --> (nothing)
 *                          \-- KNOWN_ASKED_US without an answer --> (nothing)
 * Thread-safe. */
#ifndef TANDEM_STORE_KNOWN_H
#define TANDEM_STORE_KNOWN_H
#include "store/store.h"

#define KNOWN_SETS      (16u << 10)
#define KNOWN_WAYS      4u
#define KNOWN_ASKED_US  100000  /* as long may a request wait for the answer */
#define KNOWN_ABSENT_US 1000000 /* somebody may put it any time */
#define KNOWN_THERE_US  60000000

struct known;
struct known *known_create(void); /* NULL without memory or randomness */
void known_destroy(struct known *k);

/* 0 with *info; -TD_ERR_AGAIN: asked; -TD_ERR_NOTFOUND. */
int known_find(struct known *k, const char *tenant, const struct kv_block_id *id,
               struct store_block_info *info);
/* True: nothing is known, and now the question counts as asked: the caller must ask it. */
bool known_ask(struct known *k, const char *tenant, const struct kv_block_id *id);
void known_there(struct known *k, const char *tenant, const struct kv_block_id *id,
                 const struct store_block_info *info);
void known_absent(struct known *k, const char *tenant, const struct kv_block_id *id);
void known_forget_all(struct known *k);
uint64_t known_count(struct known *k); /* entries that say that a block is there */

/* A directory entry as the server keeps it; FORMAT.md has the bytes. */
#define KNOWN_ENTRY_SIZE 40
void known_entry_write(const struct store_block_info *info, uint64_t node_epoch,
                       uint8_t out[KNOWN_ENTRY_SIZE]);
/* Hostile bytes: -TD_ERR_FORMAT, -TD_ERR_CHECKSUM. */
int known_entry_parse(const void *data, size_t size, struct store_block_info *info, uint64_t *node_epoch);

#endif
