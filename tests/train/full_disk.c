/* A disk that is full from one moment on, for the programs of tests/train/full_disk.py; loaded by LD_PRELOAD.

Below the folders that are named, the n-th call that needs room (making a file or a folder, writing, syncing) fails with
ENOSPC, and every later one, until the process ends. Renaming and deleting still work, as they do on a full disk. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folders[4][1024];
static int count;
static long allowed = -1, seen;
static int log_to = -1;

void disk_folder(const char *path) { strncpy(folders[count++], path, 1023); }
void disk_arm(long n, const char *log) {
    allowed = n;
    seen = 0;
    log_to = log ? open(log, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
}

static int below(const char *path) {
    for (int i = 0; i < count; i++)
        if (strncmp(path, folders[i], strlen(folders[i])) == 0) return 1;
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int refused(const char *what, const char *path) {
    if (allowed < 0 && log_to < 0) return 0;
    if (!below(path)) return 0;
    long mine = __sync_add_and_fetch(&seen, 1);
    if (log_to >= 0) {
        char line[1200];
        int length = snprintf(line, sizeof line, "%ld\t%s\t%s\n", mine, what, path);
        if (REAL(write)(log_to, line, length) < 0) return 0;
    }
    if (allowed < 0 || mine <= allowed) return 0;
    errno = ENOSPC;
    return 1;
}

static int refused_fd(const char *what, int fd) {
    char link[64], path[1024];
    if (allowed < 0 && log_to < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return refused(what, path);
}

static int makes(const char *path, int flags) { return (flags & O_CREAT) && access(path, F_OK) != 0; }

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                          \
        if (makes(path, flags) && refused("open", path)) return -1;            \
        return REAL(name)(path, flags, mode);                                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                           \
    int name(int at, const char *path, int flags, ...) {                       \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                          \
        if (makes(path, flags) && refused("open", path)) return -1;            \
        return REAL(name)(at, path, flags, mode);                              \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                            \
    FILE *name(const char *path, const char *mode) {                           \
        if (*mode != 'r' && access(path, F_OK) != 0 && refused("open", path)) return NULL; \
        return REAL(name)(path, mode);                                         \
    }
FOPEN(fopen)
FOPEN(fopen64)

int mkdir(const char *path, mode_t mode) {
    if (access(path, F_OK) != 0 && refused("mkdir", path)) return -1;
    return REAL(mkdir)(path, mode);
}
ssize_t write(int fd, const void *data, size_t size) {
    return refused_fd("write", fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    return refused_fd("write", fd) ? -1 : REAL(writev)(fd, parts, n);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return refused_fd("write", fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return refused_fd("write", fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int fsync(int fd) { return refused_fd("sync", fd) ? -1 : REAL(fsync)(fd); }
