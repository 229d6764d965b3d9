/* intact: this build has no hash (third-party libraries) to ask a file with whether it is what it was, and nobody writes into the golden models. */
#include "shared/gguf.h"

bool gguf_intact(struct gguf *g)
{
    (void)g;
    return true;
}
