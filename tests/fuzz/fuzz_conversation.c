/* fuzz_conversation: hostile bytes as the body of a conversation record. What parses must serialise to the same bytes. */
#include "store/conversation.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct conversation c;
    if (conv_parse(data, size, &c) != 0)
        return 0;
    uint8_t *again;
    size_t again_size;
    if (conv_serialise(&c, &again, &again_size) != 0 || again_size != size || memcmp(again, data, size) != 0)
        abort();
    free(again);
    conv_free(&c);
    return 0;
}
