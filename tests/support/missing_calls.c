/* Take calls away from a file system, for files below one directory, as network and object file systems lack them.

   Loaded with LD_PRELOAD. Environment:
     FS_ROOT     directory below which the calls are missing
     FS_MISSING  some of link, flock, fcntl, fsyncdir, fsyncfile, excl, rename (of directories), in any form of list
     FS_ERRNO    number of the error with which a missing call fails
     FS_STALE    "N" or "N,M": every so many opens (N) and reads (M) one fails with ESTALE
     FS_LOG      file that gets one line for each refused call */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long opens, reads;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
  const char *root = getenv("FS_ROOT");
  return root && path && !strncmp(path, root, strlen(root));
}

static int path_of(int fd, char *path) {
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(name, path, PATH_MAX - 1);
  path[size < 0 ? 0 : size] = 0;
  return size > 0;
}

static void note(const char *call, const char *path) {
  const char *log = getenv("FS_LOG");
  if (!log) return;
  char line[PATH_MAX + 64];
  int size = snprintf(line, sizeof line, "%s %s\n", call, path);
  int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
  if (fd >= 0) {
    syscall(SYS_write, fd, line, (size_t)size);
    syscall(SYS_close, fd);
  }
}

static int fail(const char *call, const char *path, int code) {
  note(call, path);
  errno = code;
  return -1;
}

static int missing(const char *call, const char *path) {
  const char *calls = getenv("FS_MISSING");
  return calls && strstr(calls, call) && below(path);
}

static int refuse(const char *call, const char *path) {
  return fail(call, path, atoi(getenv("FS_ERRNO") ? getenv("FS_ERRNO") : "38"));
}

static int stale(int is_open, const char *path) {
  const char *text = getenv("FS_STALE");
  if (!text || !below(path)) return 0;
  char *end;
  long every = strtol(text, &end, 10);
  if (!is_open) every = *end ? atol(end + 1) : 0;
  if (!every) return 0;
  return (atomic_fetch_add(is_open ? &opens : &reads, 1) + 1) % every == 0;
}

int link(const char *from, const char *to) {
  return missing("link", from) ? refuse("link", from) : NEXT(link)(from, to);
}

int linkat(int fd, const char *from, int fd2, const char *to, int flags) {
  return missing("link", from) ? refuse("link", from) : NEXT(linkat)(fd, from, fd2, to, flags);
}

int rename(const char *from, const char *to) {
  struct stat found;
  if (missing("rename", from) && !stat(from, &found) && S_ISDIR(found.st_mode)) return refuse("rename", from);
  return NEXT(rename)(from, to);
}

int flock(int fd, int operation) {
  char path[PATH_MAX];
  if (path_of(fd, path) && missing("flock", path)) return refuse("flock", path);
  return NEXT(flock)(fd, operation);
}

static int control(int (*next)(int, int, ...), int fd, int command, void *argument) {
  char path[PATH_MAX];
  int is_lock = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
  if (is_lock && path_of(fd, path) && missing("fcntl", path)) return refuse("fcntl", path);
  return next(fd, command, argument);
}

int fcntl(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  void *argument = va_arg(list, void *);
  va_end(list);
  return control(NEXT(fcntl), fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  void *argument = va_arg(list, void *);
  va_end(list);
  return control(NEXT(fcntl64), fd, command, argument);
}

static int flush(int (*next)(int), int fd) {
  char path[PATH_MAX];
  struct stat found;
  if (path_of(fd, path) && !fstat(fd, &found)) {
    const char *call = S_ISDIR(found.st_mode) ? "fsyncdir" : "fsyncfile";
    if (missing(call, path)) return refuse(call, path);
  }
  return next(fd);
}

int fsync(int fd) { return flush(NEXT(fsync), fd); }
int fdatasync(int fd) { return flush(NEXT(fdatasync), fd); }

#define OPEN(name, prototype, path, call)                                       \
  int name prototype {                                                          \
    int mode = 0;                                                               \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                      \
      va_list list;                                                             \
      va_start(list, flags);                                                    \
      mode = va_arg(list, int);                                                 \
      va_end(list);                                                             \
    }                                                                           \
    if ((flags & O_EXCL) && missing("excl", path)) return refuse("excl", path); \
    if (stale(1, path)) return fail("open", path, ESTALE);                      \
    return call;                                                                \
  }

OPEN(open, (const char *path, int flags, ...), path, NEXT(open)(path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), path, NEXT(open64)(path, flags, mode))
OPEN(openat, (int fd, const char *path, int flags, ...), path, NEXT(openat)(fd, path, flags, mode))
OPEN(openat64, (int fd, const char *path, int flags, ...), path, NEXT(openat64)(fd, path, flags, mode))

static int is_stale_read(int fd) {
  char path[PATH_MAX];
  return getenv("FS_STALE") && path_of(fd, path) && stale(0, path) && fail("read", path, ESTALE);
}

ssize_t read(int fd, void *to, size_t size) { return is_stale_read(fd) ? -1 : NEXT(read)(fd, to, size); }

ssize_t pread(int fd, void *to, size_t size, off_t at) {
  return is_stale_read(fd) ? -1 : NEXT(pread)(fd, to, size, at);
}

ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
  return is_stale_read(fd) ? -1 : NEXT(pread64)(fd, to, size, at);
}
