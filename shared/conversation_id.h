/* conversation_id: a conversation's name, as it may stand in a header, a path and a command line. */
#ifndef TANDEM_SHARED_CONVERSATION_ID_H
#define TANDEM_SHARED_CONVERSATION_ID_H
#include <stdbool.h>

#define CONVERSATION_ID_MAX 64 /* characters */

/* 1 to CONVERSATION_ID_MAX letters, digits or any of - _ . : */
bool conversation_id_valid(const char *id);

#endif
