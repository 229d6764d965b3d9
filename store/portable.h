/* portable: a sealed file for what leaves a machine: exports of conversations and of stores. Whoever has the file and the words that it was sealed
 * with can open it anywhere; nobody else can read it or change it unnoticed.
 *
 *      0   8  "TDPORT01"
 *      8  32  salt
 *     40   4  iterations, u32le
 *     44  20  zeros
 *     then frames, as many as there are, the last one marked:
 *      0   4  bytes of text, u32le
 *      4   4  1 in the last frame, else 0, u32le
 *      8      the text, AES-256-GCM, then its tag of 16 bytes; nonce: the frame's number; authenticated with it: the file's head and the frame's
 *
 * key = PBKDF2-HMAC-SHA-256(SHA-256(words), salt, iterations): 600,000 of them make guessing words slow; better are words that cannot be guessed.
 * Each file has its own salt, so its own key. A file without its last frame was cut off, and says so. */
#ifndef TANDEM_STORE_PORTABLE_H
#define TANDEM_STORE_PORTABLE_H
#include "shared/crypto.h"
#include "shared/status.h"

#define PORTABLE_MAGIC          "TDPORT01"
#define PORTABLE_HEAD_SIZE      64
#define PORTABLE_FRAME_MAX      (512u << 20)
#define PORTABLE_ITERATIONS     600000 /* those of new files */
#define PORTABLE_ITERATIONS_MAX 10000000
#define PORTABLE_WORDS_MAX      1024 /* characters in a key file */

struct portable;
/* A new file of mode 0600, which has its name once it is finished (shared/new_file.h); one that is there already is -TD_ERR_EXISTS and stays as it is. */
int portable_create(const char *path, const char *words, struct portable **out, struct td_error *err);
int portable_create_with(const char *path, const char *words, uint32_t iterations, struct portable **out,
                         struct td_error *err); /* tests: fewer iterations */
int portable_write(struct portable *p, const void *data, size_t size, struct td_error *err);
/* The last frame, then to the disk. p is gone; after a failure so is the file. */
int portable_finish(struct portable *p, struct td_error *err);

int portable_open(const char *path, const char *words, struct portable **out, struct td_error *err);
/* The next frame: 1, and *data is malloc'ed, the caller's; 0 after the last; or negative: other words, a damaged file, one cut off. */
int portable_read(struct portable *p, uint8_t **data, size_t *size, struct td_error *err);
/* Reading: bytes of the file so far, and in all. */
void portable_progress(const struct portable *p, uint64_t *done, uint64_t *total);
/* Also: give up what is being written; its file goes. */
void portable_close(struct portable *p);

void portable_key(const char *words, const uint8_t salt[32], uint32_t iterations,
                  uint8_t out[CRYPTO_KEY_SIZE]);

#endif
