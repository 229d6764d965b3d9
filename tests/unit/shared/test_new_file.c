/* new_file: whole under its name, or nothing there. */
#include "shared/new_file.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[32], path[64];

static int set_up(void **state)
{
    (void)state;
    signal(SIGXFSZ, SIG_IGN);
    strcpy(folder, "/tmp/tandem-new-file-XXXXXX");
    snprintf(path, sizeof path, "%s/file", mkdtemp(folder));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return rmdir(folder);
}

static int files(void)
{
    int count = 0;
    DIR *d = opendir(folder);
    for (const struct dirent *e; (e = readdir(d));)
        count += e->d_name[0] != '.';
    closedir(d);
    return count;
}

static void holds(const char *wanted)
{
    char text[16] = "";
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fread(text, 1, sizeof text - 1, f), strlen(wanted));
    fclose(f);
    assert_string_equal(text, wanted);
}

static void it_has_its_name_once_it_is_whole(void **state)
{
    (void)state;
    struct new_file f;
    struct stat st;
    struct td_error err = {0};
    assert_int_equal(new_file_create(&f, path, &err), 0);
    fputs("text", f.stream);
    fflush(f.stream);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(new_file_finish(&f, &err), 0);
    holds("text");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(files(), 1);
    assert_int_equal(new_file_create(&f, path, &err), -TD_ERR_EXISTS);
    assert_non_null(strstr(err.text, "there already"));
    assert_int_equal(files(), 1);
    unlink(path);
}

static void what_came_meanwhile_stays(void **state)
{
    (void)state;
    struct new_file a, b;
    struct td_error err = {0};
    assert_int_equal(new_file_create(&a, path, &err), 0);
    assert_int_equal(new_file_create(&b, path, &err), 0);
    fputs("a", a.stream);
    fputs("b", b.stream);
    assert_int_equal(new_file_finish(&b, &err), 0);
    assert_int_equal(new_file_finish(&a, &err), -TD_ERR_EXISTS);
    holds("b");
    assert_int_equal(files(), 1);
    unlink(path);
}

/* A file system without files that have no name. */
static bool refuses;
int __real_open(const char *name, int flags, ...);
int __wrap_open(const char *name, int flags, ...);

int __wrap_open(const char *name, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int mode = va_arg(list, int);
    va_end(list);
    if (refuses && (flags & O_TMPFILE) == O_TMPFILE) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return __real_open(name, flags, mode);
}

static void a_program_that_is_killed_leaves_nothing(void **state)
{
    (void)state;
    int fd = open(folder, O_TMPFILE | O_WRONLY, 0600), status;
    if (fd < 0)
        skip();
    close(fd);
    pid_t child = fork();
    if (child == 0) {
        struct new_file f;
        int rc = new_file_create(&f, path, NULL);
        fputs("half of it", f.stream);
        fflush(f.stream);
        _exit(rc < 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(files(), 0);
}

static void nothing_is_left_of_what_failed(void **state)
{
    (void)state;
    struct new_file f;
    struct rlimit before;
    struct td_error err = {0};
    assert_int_equal(new_file_create(&f, path, &err), 0);
    fputs("given up", f.stream);
    new_file_discard(&f);
    new_file_discard(&f);
    assert_int_equal(files(), 0);

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){4, before.rlim_max}), 0);
    assert_int_equal(new_file_create(&f, path, &err), 0);
    fputs("more than that", f.stream);
    int rc = new_file_finish(&f, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(rc, -TD_ERR_DISKFULL);
    assert_non_null(strstr(err.text, "too large"));
    assert_int_equal(files(), 0);

    assert_int_equal(new_file_create(&f, "/nowhere/at/all", &err), -TD_ERR_IO);
    assert_null(f.stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_has_its_name_once_it_is_whole),
        cmocka_unit_test(what_came_meanwhile_stays),
        cmocka_unit_test(a_program_that_is_killed_leaves_nothing),
        cmocka_unit_test(nothing_is_left_of_what_failed),
    };
    int failed = cmocka_run_group_tests_name("new_file", tests, set_up, tear_down);
    refuses = true;
    return failed + cmocka_run_group_tests_name("new_file with a name", tests, set_up, tear_down);
}
