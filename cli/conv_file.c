/* conv_file: exported conversations as files. They are what people said, so they are sealed (store/portable.h) unless somebody says --plain. */
#include "cli/conv_cmd.h"
#include "shared/new_file.h"
#include "store/portable.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONV_FILE_MAX (64u << 20)

static int write_plain(const char *path, const char *json, size_t size, struct td_error *err)
{
    struct new_file f;
    int rc = new_file_create(&f, path, err);
    if (rc < 0)
        return rc;
    errno = 0;
    if (fwrite(json, 1, size, f.stream) == size)
        return new_file_finish(&f, err);
    rc = new_file_failed(&f, err);
    new_file_discard(&f);
    return rc;
}

int conv_file_write(const char *path, const char *key_file, bool plain, const char *json, size_t size,
                    struct td_error *err)
{
    char words[PORTABLE_WORDS_MAX];
    struct portable *p;
    if (plain)
        return write_plain(path, json, size, err);
    int rc = config_read_secret(key_file, words, sizeof words, err);
    rc = rc < 0 ? rc : portable_create(path, words, &p, err);
    crypto_wipe(words, sizeof words);
    if (rc < 0)
        return rc;
    rc = portable_write(p, json, size, err);
    if (rc == 0)
        return portable_finish(p, err);
    portable_close(p);
    return rc;
}

static int read_plain(FILE *f, const char *path, char **json, size_t *size, struct td_error *err)
{
    size_t capacity = 1u << 16;
    char *data = NULL;
    *size = 0;
    for (size_t got = 1; got > 0 && capacity <= CONV_FILE_MAX; *size += got) {
        if (!data || *size == capacity) {
            capacity *= data ? 2 : 1;
            char *grown = realloc(data, capacity);
            if (!grown) {
                free(data);
                return td_fail(err, -TD_ERR_NOMEM, "cannot read %s: out of memory", path);
            }
            data = grown;
        }
        got = fread(data + *size, 1, capacity - *size, f);
    }
    *json = data;
    return 0;
}

static int read_sealed(const char *path, const char *key_file, char **json, size_t *size,
                       struct td_error *err)
{
    char words[PORTABLE_WORDS_MAX];
    struct portable *p;
    if (!key_file[0])
        return td_fail(err, -TD_ERR_ARG,
                       "%s is sealed: name the key file that it was exported with (--export-key-file)", path);
    int rc = config_read_secret(key_file, words, sizeof words, err);
    rc = rc < 0 ? rc : portable_open(path, words, &p, err);
    crypto_wipe(words, sizeof words);
    if (rc < 0)
        return rc;
    rc = portable_read(p, (uint8_t **)json, size, err);
    portable_close(p);
    return rc == 0 ? td_fail(err, -TD_ERR_FORMAT, "%s holds no conversation", path) : rc < 0 ? rc : 0;
}

/* It is looked at twice, so it must be a file: a pipe would be empty, or wait for ever, the second time. */
static int open_file(const char *path, FILE **out, struct td_error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY), rc = 0;
    if (fd < 0 || fstat(fd, &st) < 0)
        rc = td_fail(err, -TD_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = td_fail(err, -TD_ERR_ARG, "cannot read %s: it is not a regular file", path);
    else if (st.st_size > CONV_FILE_MAX)
        rc = td_fail(err, -TD_ERR_LIMIT,
                     "cannot read %s: it is larger than any exported conversation (%u MiB)", path,
                     CONV_FILE_MAX >> 20);
    else if (!(*out = fdopen(fd, "rb")))
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot read %s: out of memory", path);
    if (rc < 0 && fd >= 0)
        close(fd);
    return rc;
}

int conv_file_read(const char *path, const char *key_file, char **json, size_t *size, struct td_error *err)
{
    char magic[8] = "";
    FILE *f;
    int rc = open_file(path, &f, err);
    if (rc < 0)
        return rc;
    bool sealed = fread(magic, sizeof magic, 1, f) == 1 && memcmp(magic, PORTABLE_MAGIC, sizeof magic) == 0;
    rewind(f);
    rc = sealed ? read_sealed(path, key_file, json, size, err) : read_plain(f, path, json, size, err);
    fclose(f);
    return rc;
}

int conv_file_body(const char *json, size_t size, bool loopback, char **body, struct td_error *err)
{
    json_t *root = json_loadb(json, size, 0, NULL);
    int rc =
        json_is_object(root) ? 0 : td_fail(err, -TD_ERR_FORMAT, "the file holds no exported conversation");
    if (rc == 0 && json_object_get(root, "vault") && !loopback)
        rc = td_fail(err, -TD_ERR_ARG,
                     "this conversation carries values that an agent's filter kept on its device: import it "
                     "at an agent on this machine");
    if (rc == 0) {
        json_object_del(root, "messages");
        *body = json_dumps(root, JSON_COMPACT);
        rc = *body ? 0 : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    }
    json_decref(root);
    return rc;
}
