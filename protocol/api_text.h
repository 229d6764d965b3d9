/* api_text: what a client may see of a reply: valid UTF-8, without stop strings, out of the bytes of its tokens as they come. No I/O, no clock;
 * one thread an object. */
#ifndef TANDEM_PROTOCOL_API_TEXT_H
#define TANDEM_PROTOCOL_API_TEXT_H
#include "protocol/limits.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Valid UTF-8 out of any bytes, malloc'ed, invalid ones replaced. */
char *api_utf8_repair(const char *data, size_t size, size_t *out_size);

struct api_text { /* grows; NUL-terminated once something was appended */
    char *data;
    size_t size, capacity;
};
int api_text_append(struct api_text *b, const void *data, size_t size);
void api_text_free(struct api_text *b);

struct api_text_stream { /* the text of one reply on its way to the client */
    char *const *stops;
    size_t stop_sizes[LIMIT_API_STOPS];
    size_t stop_count;
    bool strip_space; /* the text's first space belongs to the tokenizer, not to the reply */
    bool stopped;     /* a stop string is complete: nothing more is shown */
    uint8_t partial[4];
    size_t partial_size;
    struct api_text held; /* characters that may turn out to be a stop string */
    size_t shown_size;    /* bytes that have left */
};
/* stops: borrowed */
void api_text_stream_init(struct api_text_stream *t, char *const *stops, size_t stop_count, bool strip_space);
void api_text_stream_deinit(struct api_text_stream *t);
/* Take a token's bytes; what may be shown now is appended to out. flush: nothing follows. 0 or -TD_ERR_NOMEM; see t->stopped. */
int api_text_stream_feed(struct api_text_stream *t, const void *data, size_t size, bool flush,
                         struct api_text *out);

#endif
