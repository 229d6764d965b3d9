/* tokenizer_internal: what the files tokenizer*.c share and nobody else may include.
 *
 *   tokenizer_load.c    GGUF keys -> the tables below
 *   tokenizer.c         look-ups, pieces, decoding, identity
 *   tokenizer_encode.c  text -> fragments (special tokens and raw text) -> words
 *   tokenizer_pre.c     raw text -> words, for byte-level BPE
 *   tokenizer_merge.c   one word -> ids, for both kinds
 *
 * A *symbol* is a string that merging may meet: symbols [0, vocab_count) are the tokens, those behind are
 * strings which occur in merges or as single bytes without being a token. */
#ifndef TANDEM_SHARED_TOKENIZER_INTERNAL_H
#define TANDEM_SHARED_TOKENIZER_INTERNAL_H
#include "shared/tokenizer.h"

#define SYMBOL_NONE UINT32_MAX

enum tokenizer_kind { TOKENIZER_BPE, TOKENIZER_SPM };
enum pre_kind { PRE_SMOLLM, PRE_LLAMA_BPE, PRE_QWEN2 };

enum { /* tokenizer.ggml.token_type */
       TOKEN_NORMAL = 1,
       TOKEN_UNKNOWN = 2,
       TOKEN_CONTROL = 3,
       TOKEN_USER_DEFINED = 4,
       TOKEN_UNUSED = 5,
       TOKEN_BYTE = 6,
};

struct vocab_token {
    struct span text;  /* as in the file, without NUL */
    struct span piece; /* the bytes that it stands for */
    uint32_t rank;     /* SPM: order of merging, the smallest first; a monotone image of the score */
    uint8_t type;
    bool hidden; /* control and unknown tokens: no plain text gives them and they add none */
    bool plain;  /* merging may end in it: neither hidden nor a byte token */
    bool end;    /* ends a reply */
};

struct text_table {  /* string -> symbol; open addressing, at most half full */
    uint32_t *slots; /* symbol + 1, 0: free */
    size_t slot_count;
};

struct pair_slot {                      /* one BPE merge */
    uint32_t left, right, merged, rank; /* left == SYMBOL_NONE: free */
};

struct tokenizer {
    enum tokenizer_kind kind;
    enum pre_kind pre;
    bool add_bos, add_space_prefix;
    bool ignore_merges; /* a word that is a token is not merged from its bytes */
    bool spaces_lead;   /* SPM: no token has U+2581 behind another character, so words may be cut there */
    int32_t bos, eos, unknown;

    struct vocab_token *tokens;
    uint32_t vocab_count;
    size_t text_size_max; /* of a token's text */
    char *pool;           /* texts and pieces of the tokens */

    struct span *symbols; /* texts */
    uint32_t symbol_count, symbol_capacity;
    struct text_table table;

    struct pair_slot *pairs;
    size_t pair_slot_count;
    char *merge_pool; /* texts of symbols that are no tokens */

    uint32_t byte_symbol[256]; /* BPE: the symbol that a byte begins as */
    int32_t byte_token[256];   /* the token that stands for a byte that found no other, or -1 */
    char byte_text[256][3];    /* BPE: a byte as vocabulary text, UTF-8 */
    uint8_t byte_text_size[256];

    int32_t *specials; /* hidden and user-defined tokens, the longest text first */
    size_t special_count;
    uint8_t id[TD_HASH_SIZE];
};

static inline uint64_t mix64(uint64_t h)
{
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    return h;
}

/* U+2581, which stands for a blank in SPM vocabularies. */
#define SPM_BLANK "\xe2\x96\x81"
static inline bool is_blank(const char *text, size_t size)
{
    return size >= 3 && memcmp(text, SPM_BLANK, 3) == 0;
}

uint64_t text_hash(const char *text, size_t size);
/* text_table_find: symbol of a string or SYMBOL_NONE. */
uint32_t text_table_find(const struct tokenizer *t, const char *text, size_t size);

/* tokenizer_load: fill the zero-initialised t; on failure the caller destroys it. */
int tokenizer_load(struct tokenizer *t, const struct gguf *g, const char *pre_override, struct td_error *err);

/* pre_next_word: end of the word that begins at text[begin], begin < end. */
size_t pre_next_word(enum pre_kind kind, const char *text, size_t begin, size_t end);

struct token_sink { /* where ids go; counts on when full */
    int32_t *ids;
    size_t capacity;
    int64_t count;
};

static inline void sink_put(struct token_sink *s, int32_t id)
{
    if (s->count < (int64_t)s->capacity)
        s->ids[s->count] = id;
    s->count++;
}

struct merge_symbol {
    uint32_t id;         /* symbol, or SYMBOL_NONE */
    uint32_t begin;      /* in the word */
    uint32_t prev, next; /* indices, SYMBOL_NONE at the ends */
};

struct merge_scratch { /* one call's working memory; zero-initialised, freed with merge_scratch_free */
    struct merge_symbol *symbols;
    size_t symbol_capacity;
    uint64_t *heap; /* rank << 32 | index of the left symbol */
    size_t heap_capacity, heap_count;
};

void merge_scratch_free(struct merge_scratch *m);
/* merge_word: put the ids of one word into the sink. 0 or -TD_ERR_NOMEM. */
int merge_word(const struct tokenizer *t, struct merge_scratch *m, const char *word, size_t size,
               struct token_sink *sink);

#endif
