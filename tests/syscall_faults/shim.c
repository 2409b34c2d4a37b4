/* Lets the k-th call of one kind fail, in a process that has this library preloaded.
 *
 * Calls are counted from faults_start() to faults_stop(), in all threads. What the dynamic
 * linker and the C library do inside does not come by here, and neither do writes to standard
 * output and error, files opened outside of the given folder, and private memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum kind {
    WRITE, FSYNC, RENAME, MEMFD, FORK, PIDFD, TRUNCATE, MMAP, SOCKETPAIR, OPEN, DUP, MKDIR, SOCKET,
    NUM_KINDS
};

static atomic_int counts[NUM_KINDS];
static atomic_int is_active, num_failed;
static int failing_kind = -1, failing_call, failing_errno, is_lasting;
static char folder[PATH_MAX];

void faults_start(int kind, int call, int error, int lasting, const char *prefix)
{
    for (int one = 0; one < NUM_KINDS; one++)
        counts[one] = 0;
    failing_kind = kind, failing_call = call, failing_errno = error, is_lasting = lasting;
    strncpy(folder, prefix, sizeof folder - 1);
    num_failed = 0;
    is_active = 1;
}

void faults_stop(void) { is_active = 0; }
int faults_count(int kind) { return counts[kind]; }
int faults_failed(void) { return num_failed; }

/* Whether this call is to fail; errno is set. An error of 0 is a short write. */
static int fails(enum kind kind)
{
    if (!is_active)
        return 0;
    int call = ++counts[kind];
    if (kind != failing_kind || call < failing_call || (call > failing_call && !is_lasting))
        return 0;
    num_failed++;
    errno = failing_errno;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t length)
{
    REAL(write);
    if (fd > 2 && fails(WRITE))
        return failing_errno ? -1 : real(fd, data, (length + 1) / 2);
    return real(fd, data, length);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    REAL(pwrite);
    if (fails(WRITE))
        return failing_errno ? -1 : real(fd, data, (length + 1) / 2, offset);
    return real(fd, data, length, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset)
{
    REAL(pwrite64);
    if (fails(WRITE))
        return failing_errno ? -1 : real(fd, data, (length + 1) / 2, offset);
    return real(fd, data, length, offset);
}

#define FAILING(type, name, kind, parameters, arguments) \
    type name parameters \
    { \
        REAL(name); \
        return fails(kind) ? (type)-1 : real arguments; \
    }

FAILING(int, fsync, FSYNC, (int fd), (fd))
FAILING(int, fdatasync, FSYNC, (int fd), (fd))
FAILING(int, rename, RENAME, (const char *from, const char *to), (from, to))
FAILING(int, renameat, RENAME, (int from_fd, const char *from, int to_fd, const char *to),
        (from_fd, from, to_fd, to))
FAILING(int, memfd_create, MEMFD, (const char *name, unsigned flags), (name, flags))
FAILING(pid_t, fork, FORK, (void), ())
FAILING(int, ftruncate, TRUNCATE, (int fd, off_t length), (fd, length))
FAILING(int, ftruncate64, TRUNCATE, (int fd, off64_t length), (fd, length))
FAILING(int, socketpair, SOCKETPAIR, (int domain, int type, int protocol, int fds[2]),
        (domain, type, protocol, fds))
FAILING(int, socket, SOCKET, (int domain, int type, int protocol), (domain, type, protocol))
FAILING(int, mkdir, MKDIR, (const char *path, mode_t mode), (path, mode))

/* A fork where the kernel would have lent the memory: the callers need not know. */
pid_t vfork(void) { return fork(); }

int posix_fallocate(int fd, off_t offset, off_t length)
{
    REAL(posix_fallocate);
    return fails(TRUNCATE) ? failing_errno : real(fd, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    REAL(posix_fallocate64);
    return fails(TRUNCATE) ? failing_errno : real(fd, offset, length);
}

static int is_shared(int flags) { return flags & MAP_SHARED; }

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    REAL(mmap);
    if (is_shared(flags) && fails(MMAP))
        return MAP_FAILED;
    return real(address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    REAL(mmap64);
    if (is_shared(flags) && fails(MMAP))
        return MAP_FAILED;
    return real(address, length, protection, flags, fd, offset);
}

static int is_inside(const char *path) { return !strncmp(path, folder, strlen(folder)); }

#define OPENING(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (is_active && is_inside(path) && fails(OPEN)) \
            return -1; \
        return real(path, flags, mode); \
    }

OPENING(open)
OPENING(open64)

#define CONTROLLING(name) \
    int name(int fd, int command, ...) \
    { \
        REAL(name); \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        if (command == F_DUPFD_CLOEXEC && fails(DUP)) \
            return -1; \
        return real(fd, command, argument); \
    }

CONTROLLING(fcntl)
CONTROLLING(fcntl64)

long syscall(long number, ...)
{
    REAL(syscall);
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long),
         d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_pidfd_open && fails(PIDFD))
        return -1;
    return real(number, a, b, c, d, e, f);
}
