/* tokenizer: text <-> token ids, from the tokenizer.ggml.* keys of a GGUF file.
 * Kinds: byte-level BPE ("gpt2") with the pre-tokenizers smollm, llama-bpe, qwen2 (a missing or unknown `pre` is refused, not
 * guessed), and SentencePiece-style ("llama": scores, byte fallback, add_space_prefix). Immutable after creation, so
 * thread-safe. Special tokens are recognised only inside spans that the caller marks (template text), never in what a
 * user wrote. */
#ifndef TANDEM_SHARED_TOKENIZER_H
#define TANDEM_SHARED_TOKENIZER_H
#include "shared/gguf.h"

#define TOKENIZER_TEXT_MAX (16u << 20) /* bytes of one text */

struct tokenizer;

struct text_range { /* [begin, end) in bytes */
    size_t begin, end;
};

/* pre_override: NULL, or the name of a pre-tokenizer to use instead of the file's (tests, --pretokenizer). */
int tokenizer_create(const struct gguf *g, const char *pre_override, struct tokenizer **out,
                     struct td_error *err);
void tokenizer_destroy(struct tokenizer *t);

/* tokenizer_encode: ids of text. Ranges where special tokens are recognised: `special` (ascending, disjoint; may be NULL/0).
 * add_bos follows the caller, not the file. Returns the count (which may exceed ids_capacity: nothing past it is written; call again), or
 * -TD_ERR_NOMEM, -TD_ERR_LIMIT, -TD_ERR_ARG (ranges). Invalid UTF-8 bytes are encoded as bytes; decoding gives the same bytes back,
 * except those for which the vocabulary has no token at all (SmolLM2's lacks 21 that text hardly has): they are lost. */
int64_t tokenizer_encode(const struct tokenizer *t, const char *text, size_t size,
                         const struct text_range *special, size_t special_count, bool add_bos, int32_t *ids,
                         size_t ids_capacity);
/* The same, all of them, in memory of their own (malloc'ed) behind room for `before` ids. The count without these. */
int64_t tokenizer_encode_new(const struct tokenizer *t, const char *text, size_t size,
                             const struct text_range *special, size_t special_count, bool add_bos,
                             size_t before, int32_t **ids);

/* tokenizer_piece: the bytes that one token adds to the text (borrowed for the tokenizer's life). Control tokens: empty
 * unless `render_special`. Unknown id: empty. SentencePiece: a leading U+2581 becomes a space (strip the first of a
 * text with tokenizer_strips_leading_space). */
struct span tokenizer_piece(const struct tokenizer *t, int32_t id, bool render_special);
/* tokenizer_decode: concatenated pieces; returns bytes needed (may exceed capacity), like tokenizer_encode. */
int64_t tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t count, bool render_special,
                         char *out, size_t capacity);
bool tokenizer_strips_leading_space(const struct tokenizer *t);

uint32_t tokenizer_vocab_count(const struct tokenizer *t);
bool tokenizer_add_bos(const struct tokenizer *t);            /* the file's wish */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id); /* eos, eot, <|im_end|>, <|eot_id|>, … */
/* id of an exact (special or raw vocabulary) piece, or -1 */
int32_t tokenizer_find(const struct tokenizer *t, const char *piece);
/* Identifies vocabulary + merges + pre-tokenizer + specials: conversations of models with equal ids can share token ids. */
void tokenizer_id(const struct tokenizer *t, uint8_t out[TD_HASH_SIZE]);

/* utf8_complete: the longest prefix of data that does not end inside a (so far valid) UTF-8 sequence: what may be shown now. */
size_t utf8_complete(const char *data, size_t size);
bool utf8_valid(const char *data, size_t size);

#endif
