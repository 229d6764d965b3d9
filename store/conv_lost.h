/* conv_lost: which conversations have lost their last turn. Part of conv_index, which locks it. */
#ifndef TANDEM_STORE_CONV_LOST_H
#define TANDEM_STORE_CONV_LOST_H
#include "store/conversation.h"

#define CONV_LOST_MAX 1024

struct conv_lost;
struct conv_lost *conv_lost_create(void);
void conv_lost_destroy(struct conv_lost *l);
/* version, from 1: that the conversation would have had with the turn; request_key: of the turn that was lost, "" for none. */
void conv_lost_note(struct conv_lost *l, const char *tenant, const char *principal, const char *id,
                    uint64_t version, const char *request_key);
/* It is to be deleted, which nobody waits for any more. */
void conv_lost_note_deleted(struct conv_lost *l, const char *tenant, const char *principal, const char *id);
/* 0: none was lost; nor for the request that the lost turn was an answer to: it is made again. *deleted: once it is gone, nothing is lost. */
uint64_t conv_lost_version(struct conv_lost *l, const char *tenant, const char *principal, const char *id,
                           const char *request_key, bool *deleted);
void conv_lost_forget(struct conv_lost *l, const char *tenant, const char *principal, const char *id);
void conv_lost_forget_tenant(struct conv_lost *l, const char *tenant);

#endif
