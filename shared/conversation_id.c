/* conversation_id: see conversation_id.h. */
#include "shared/conversation_id.h"
#include <string.h>

bool conversation_id_valid(const char *id)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
    size_t size = strlen(id);
    return size > 0 && size <= CONVERSATION_ID_MAX && strspn(id, allowed) == size;
}
