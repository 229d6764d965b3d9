/* tandem.h: libtandem, the edge agent inside an application. A C API, stable: structs begin with their size, so that a program built against an older
 * header goes on working; what is zero takes its default.
 *
 *     struct tandem_options options = TANDEM_OPTIONS_INIT;
 *     options.model_path = "model.gguf", options.cloud = "cloud.example:8443", options.token_path = "token";
 *     struct tandem *t;
 *     char error[TANDEM_ERROR_SIZE];
 *     if (tandem_open(&options, &t, error, sizeof error) < 0) ...
 *     struct tandem_message message = {"user", "Hello"};
 *     struct tandem_request request = TANDEM_REQUEST_INIT;
 *     request.messages = &message, request.message_count = 1;
 *     tandem_generate(t, &request, on_text, on_end, context, &id);
 *     ...
 *     tandem_close(t);
 *
 * Threads: every function may be called from any thread. Callbacks come on one internal thread, one at a time; they must return soon and may call
 * tandem_generate and tandem_cancel, not tandem_close. Strings given to a function are copied before it returns. */
#ifndef TANDEM_H
#define TANDEM_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TANDEM_API __attribute__((visibility("default")))
#else
#define TANDEM_API
#endif

#define TANDEM_ERROR_SIZE 384

/* Functions return 0 or the negative of one of these; tandem_error_text gives each one's text. */
enum tandem_error {
    TANDEM_ERR_ARG = 1,          /* an option or argument is not usable */
    TANDEM_ERR_NOMEM = 2,        /* out of memory */
    TANDEM_ERR_FULL = 4,         /* too many requests at once */
    TANDEM_ERR_CLOSED = 5,       /* no cloud, or the agent is closing */
    TANDEM_ERR_TIMEOUT = 6,      /* waited in vain */
    TANDEM_ERR_IO = 7,           /* a file could not be read or written */
    TANDEM_ERR_NOTFOUND = 8,     /* no such conversation */
    TANDEM_ERR_FORMAT = 10,      /* a file is not what it should be */
    TANDEM_ERR_AUTH = 16,        /* the cloud does not know this credential */
    TANDEM_ERR_UNSUPPORTED = 18, /* not supported */
    TANDEM_ERR_MISMATCH = 19,    /* another model than the cloud's, or than the conversation's */
    TANDEM_ERR_CANCELLED = 21,   /* tandem_cancel was called */
    TANDEM_ERR_PROTOCOL = 22,    /* the cloud broke the protocol */
    TANDEM_ERR_CONFLICT = 23,    /* the conversation was continued elsewhere meanwhile */
    TANDEM_ERR_CONTEXT = 26,     /* prompt and reply do not fit the context */
    TANDEM_ERR_BLOCKED = 27,     /* a word list blocks this text */
    TANDEM_ERR_INTERNAL = 28
};

struct tandem;

struct tandem_options {
    size_t size;                                    /* TANDEM_OPTIONS_INIT sets it */
    const char *model_path;                         /* GGUF file, whole or a slice; needed */
    const char *cloud;                              /* "host:port"; NULL: "localhost:8443" */
    const char *ca_path;                            /* PEM; NULL: the system's authorities */
    const char *client_cert_path, *client_key_path; /* PEM; both or neither */
    const char *token;                              /* credential for the cloud; or */
    const char *token_path;                         /* a file with it that only its owner can read */
    const char *data_dir;                           /* conversations, keys; NULL: as tandem-edge */
    const char *words_path;                         /* word list; NULL: none */
    const char *chat_template;                      /* "chatml", "llama3", ...; NULL: the one in the file */
    int32_t edge_layers; /* layers to run here; -1: as many as pay for each prompt */
    const char *
        codec; /* "auto" (the smallest that the model's quality record lets pass), "raw", "l0", "l1", "l2", "l2-k5", "l2-5bit"; NULL: "auto" */
    const char *hidden;       /* "f32", "f16", "int8"; NULL: "f16" */
    const char *fidelity;     /* "exact", "visible-lossless", "any"; NULL: "visible-lossless" */
    int32_t threads;          /* 0: all cores */
    uint64_t kv_memory;       /* bytes; 0: 256 MiB */
    uint32_t cloud_timeout_s; /* 0: 30 */
    int32_t no_filter;        /* 1: leave personal data in prompts as it is */
    int32_t plain;            /* 1: no TLS; tests */
    int64_t kv_disk;          /* bytes of KV in data_dir, encrypted; 0: 1 GiB; -1: none */
    /* 1: KV of all layers is kept, in idle time: computed where the layer is held here, else (with a slice) given by the cloud, sealed. A conversation that
     * the cloud has lost is then sent instead of computed again, where that is sooner. */
    int32_t kv_whole;

    /* When the cloud is away: "wait" for cloud_timeout_s, or "continue": this device makes the reply, or the rest of it, and hands back when the cloud is
     * there again. That takes the whole model, edge_layers -1, and a cloud that has been reached once with this data_dir. NULL: "wait". */
    const char *offline;
    /* First tokens made here while the cloud begins, with the whole model and edge_layers -1: "auto" (where that is sooner), "always", "off". NULL:
     * "auto". */
    const char *local;
    const char *prefer; /* of requests that name none: "latency", "cloud-cost", "private"; NULL: "latency" */
    /* with edge_layers -1: seconds of waiting that one of computing in the cloud is worth */
    double cloud_price;
    int32_t private_min_layers; /* of a private prompt, computed here at least; 0: 8 */
    int32_t chunk_tokens;       /* of a prompt, computed and sent at a time, a multiple of 64; 0: 64 */
    int32_t codec_unchecked;    /* 1: `codec` even without a quality record that shows no visible loss */
};
#define TANDEM_OPTIONS_INIT                                                                                  \
    {                                                                                                        \
        sizeof(struct tandem_options), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, -1, NULL, \
            NULL, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, 0.0, 0, 0, 0                                  \
    }

/* Loads the model and begins to connect; returns before the link is there. error may be NULL; it gets one line. */
TANDEM_API int tandem_open(const struct tandem_options *options, struct tandem **out, char *error,
                           size_t error_size);
/* Ends what is under way (its on_end is called, with TANDEM_ERR_CLOSED), then frees everything. */
TANDEM_API void tandem_close(struct tandem *t);
/* Until the cloud link is there: 0, or -TANDEM_ERR_TIMEOUT. */
TANDEM_API int tandem_wait_ready(struct tandem *t, uint32_t timeout_ms);

struct tandem_message {
    const char *role;    /* "system", "user", "assistant" */
    const char *content; /* UTF-8 */
};
struct tandem_request {
    size_t size; /* TANDEM_REQUEST_INIT sets it */
    /* the history so far and the new message, or with `conversation` the new message alone */
    const struct tandem_message *messages;
    size_t message_count;
    const char *conversation;    /* NULL: found by the history, else a new one */
    const char *idempotency_key; /* NULL: none. The same key gives the same reply, also after a restart */
    const char *fidelity;        /* NULL: the options' */
    uint32_t max_tokens;         /* 0: what the context holds */
    float temperature;           /* negative: 1 */
    float top_p;                 /* 0: 1 */
    float min_p;                 /* 0: off */
    int32_t top_k;               /* 0: off */
    float presence_penalty, frequency_penalty;
    int32_t has_seed;
    uint64_t seed;
    const char *const *stops; /* texts that end the reply; at most 16 */
    size_t stop_count;
    const char *prefer; /* "latency", "cloud-cost", "private"; NULL: the options' */
};
#define TANDEM_REQUEST_INIT                                                                                  \
    {                                                                                                        \
        sizeof(struct tandem_request), NULL, 0, NULL, NULL, NULL, 0, -1.0f, 0.0f, 0.0f, 0, 0.0f, 0.0f, 0, 0, \
            NULL, 0, NULL                                                                                    \
    }

struct tandem_result { /* borrowed for the call of on_end */
    size_t size;
    int code;                 /* 0, or a negative error */
    const char *error;        /* one line; "" without */
    const char *finish;       /* "stop", "length"; "" with an error */
    const char *conversation; /* its id; "" without */
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
    double first_token_ms, total_ms, tokens_per_s, edge_prefill_ms;
    uint64_t uplink_bytes, uplink_raw_bytes;
    uint32_t local_tokens;       /* of the reply, made on this device */
    uint32_t offline_tokens;     /* of these, while the cloud was away */
    uint32_t offline_from_token; /* index of the first of them */
    double offline_estimate_ms;  /* what was thought to pass until that one */
    uint32_t retry_after_ms;     /* with an error: it may go better after so long; 0: nobody knows */
    /* 1: this turn could not be stored (the disk is full), and the conversation does not hold it. To go on by `conversation` is then TANDEM_ERR_CONFLICT;
     * the history so far with the new message is taken. */
    int not_kept;
};

/* A piece of the reply: whole UTF-8 characters, placeholders replaced by what they stand for. */
typedef void (*tandem_text_fn)(void *context, const char *text, size_t size);
/* The last call for a request; exactly one for each that tandem_generate accepted. */
typedef void (*tandem_end_fn)(void *context, const struct tandem_result *result);

/* id may be NULL. */
TANDEM_API int tandem_generate(struct tandem *t, const struct tandem_request *request, tandem_text_fn on_text,
                               tandem_end_fn on_end, void *context, uint64_t *id);
/* The reply is not wanted any more; on_end comes with TANDEM_ERR_CANCELLED, unless it ended before. Unknown ids are ignored. */
TANDEM_API int tandem_cancel(struct tandem *t, uint64_t id);

/* JSON texts as the API gives them, to be freed with tandem_free. */
TANDEM_API int tandem_conversations(struct tandem *t, char **json);
TANDEM_API int tandem_conversation_show(struct tandem *t, const char *id, char **json);
TANDEM_API int tandem_conversation_delete(struct tandem *t, const char *id);
TANDEM_API void tandem_free(void *memory);

TANDEM_API const char *tandem_error_text(int code);
TANDEM_API const char *tandem_version(void);

#ifdef __cplusplus
}
#endif
#endif
