/* paths: see paths.h. */
#include "shared/paths.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

int path_default(char *out, size_t size, const char *name, const char *options, struct td_error *err)
{
    const char *home = getenv("HOME"), *data = getenv("XDG_DATA_HOME");
    int length;
    if (geteuid() == 0)
        length = snprintf(out, size, "/var/lib/tandem/%s", name);
    else if (data && data[0] == '/')
        length = snprintf(out, size, "%s/tandem/%s", data, name);
    else if (home && home[0] == '/')
        length = snprintf(out, size, "%s/.local/share/tandem/%s", home, name);
    else
        return td_fail(err, -TD_ERR_NOTFOUND, "cannot tell where to keep data: HOME is not set; name %s",
                       options);
    if (length < 0 || (size_t)length >= size)
        return td_fail(err, -TD_ERR_LIMIT, "the path to the data folder is too long");
    return 0;
}

int path_make_parents(const char *path, struct td_error *err)
{
    char folder[PATH_SIZE_MAX];
    if (strlen(path) >= sizeof folder)
        return td_fail(err, -TD_ERR_LIMIT, "cannot make the folder of %.60s...: the path is too long", path);
    strcpy(folder, path);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(folder, 0700) < 0 && errno != EEXIST)
            return td_fail(err, errno == ENOSPC ? -TD_ERR_DISKFULL : -TD_ERR_IO,
                           "cannot make the folder %s: %s", folder, strerror(errno));
        *slash = '/';
    }
    return 0;
}

void path_model_name(const char *path, char *out, size_t size)
{
    static const char ending[] = ".gguf";
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    size_t length = strlen(base), cut = sizeof ending - 1;
    if (length > cut && strcmp(base + length - cut, ending) == 0)
        length -= cut;
    snprintf(out, size, "%.*s", (int)length, base);
}

void files_settle(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= FILES_MAX)
        return;
    limit.rlim_cur = limit.rlim_max < FILES_MAX ? limit.rlim_max : FILES_MAX;
    setrlimit(RLIMIT_NOFILE, &limit); /* what is refused changes nothing */
}
