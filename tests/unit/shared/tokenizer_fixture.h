/* tokenizer_fixture: tokenizers of the tiny models, and room for what they say. */
#ifndef TANDEM_TESTS_TOKENIZER_FIXTURE_H
#define TANDEM_TESTS_TOKENIZER_FIXTURE_H
#include "shared/tokenizer.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define IDS_MAX (1 << 20)

static int32_t ids[IDS_MAX];

static char decoded[IDS_MAX * 4];

static inline struct tokenizer *load(const char *path, const char *pre)
{
    struct gguf *g;
    struct tokenizer *t = NULL;
    struct td_error err = {0};
    if (gguf_open(path, &g, &err) != 0 || tokenizer_create(g, pre, &t, &err) != 0)
        fail_msg("%s", err.text);
    gguf_close(g); /* a tokenizer needs its file no longer */
    return t;
}

static inline struct tokenizer *load_tiny(const char *name, const char *pre)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tiny/%s.gguf", TEST_DATA, name);
    return load(path, pre);
}
#endif
