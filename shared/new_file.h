/* new_file: a file that has its name only once it is whole and on the disk. Until then it has none, so that a program that is killed meanwhile leaves nothing
 * behind, nor does a machine without power; only where the file system (NFS, for one) has no files without names it is PATH.part-XXXXXX beside
 * it. Its mode is 0600. Nothing that is there already is written over. */
#ifndef TANDEM_SHARED_NEW_FILE_H
#define TANDEM_SHARED_NEW_FILE_H
#include "shared/status.h"
#include <stdio.h>

struct new_file {
    FILE *stream;           /* to write to; NULL: not open */
    char *path, *temporary; /* "": it has no name yet */
};
/* 0; or -TD_ERR_EXISTS, -TD_ERR_IO, -TD_ERR_DISKFULL, -TD_ERR_NOMEM, and nothing is to be closed. */
int new_file_create(struct new_file *f, const char *path, struct td_error *err);
/* Sync it and give it its name. Closes it in any case; after a failure it is gone. */
int new_file_finish(struct new_file *f, struct td_error *err);
/* Give it up: it is gone. Nothing happens to one that is closed. */
void new_file_discard(struct new_file *f);
/* What errno says of a write that failed. */
int new_file_failed(const struct new_file *f, struct td_error *err);

#endif
