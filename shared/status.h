/* status: the one list of error codes, with each code's text, and the one-line error message that goes with it.
 *
 * A function that can fail returns 0 (or a count) or a negative code: -TD_ERR_*. Functions near the outside
 * (files, config, peers) also take `struct td_error *err` (may be NULL) and leave one line in it: what was being
 * done, to what, why it failed, what to do. Nothing here allocates. */
#ifndef TANDEM_SHARED_STATUS_H
#define TANDEM_SHARED_STATUS_H

#define TD_STATUS_LIST(X)                                                                                    \
    X(TD_ERR_ARG, 1, "invalid argument")                                                                     \
    X(TD_ERR_NOMEM, 2, "out of memory")                                                                      \
    X(TD_ERR_NOSPACE, 3, "buffer or pool too small")                                                         \
    X(TD_ERR_FULL, 4, "queue full")                                                                          \
    X(TD_ERR_CLOSED, 5, "closed")                                                                            \
    X(TD_ERR_TIMEOUT, 6, "timed out")                                                                        \
    X(TD_ERR_IO, 7, "input/output error")                                                                    \
    X(TD_ERR_NOTFOUND, 8, "not found")                                                                       \
    X(TD_ERR_EXISTS, 9, "already exists")                                                                    \
    X(TD_ERR_FORMAT, 10, "malformed data")                                                                   \
    X(TD_ERR_TRUNCATED, 11, "truncated data")                                                                \
    X(TD_ERR_CHECKSUM, 12, "checksum mismatch")                                                              \
    X(TD_ERR_VERSION, 13, "unsupported version")                                                             \
    X(TD_ERR_SHAPE, 14, "shape mismatch")                                                                    \
    X(TD_ERR_LIMIT, 15, "limit exceeded")                                                                    \
    X(TD_ERR_AUTH, 16, "not authorised")                                                                     \
    X(TD_ERR_CRYPTO, 17, "cryptographic failure")                                                            \
    X(TD_ERR_UNSUPPORTED, 18, "not supported")                                                               \
    X(TD_ERR_MISMATCH, 19, "does not match")                                                                 \
    X(TD_ERR_BUSY, 20, "busy")                                                                               \
    X(TD_ERR_CANCELLED, 21, "cancelled")                                                                     \
    X(TD_ERR_PROTOCOL, 22, "protocol violation")                                                             \
    X(TD_ERR_CONFLICT, 23, "conflict")                                                                       \
    X(TD_ERR_DISKFULL, 24, "disk full")                                                                      \
    X(TD_ERR_AGAIN, 25, "try again")                                                                         \
    X(TD_ERR_CONTEXT, 26, "context length exceeded")                                                         \
    X(TD_ERR_BLOCKED, 27, "blocked by policy")                                                               \
    X(TD_ERR_INTERNAL, 28, "internal error")

enum td_status {
#define X(name, value, text) name = value,
    TD_STATUS_LIST(X)
#undef X
};

#define TD_ERROR_TEXT_SIZE 384

struct td_error {
    int code;                      /* negative code, or 0 */
    char text[TD_ERROR_TEXT_SIZE]; /* one line, no newline, no secrets; "" when code is 0 */
};

/* td_status_text: the fixed text of a code (negative or positive). Never NULL. Thread-safe. */
const char *td_status_text(int code);

/* td_fail: write the message (err may be NULL) and return `code`, so that a check is one line:
 *     return td_fail(err, -TD_ERR_FORMAT, "cannot load %s: not a GGUF file", path);   */
int td_fail(struct td_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
