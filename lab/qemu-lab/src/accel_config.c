/* Makes regular files behave as the kernel's attributes do where accel-config writes them. Loaded before its libraries.
 *
 * An attribute is replaced by what is written, whatever it was before, and reads back with a newline (sysfs(5)); a write to
 * cmd_status clears it (the kernel's Documentation/ABI/stable/sysfs-driver-dma-idxd). What is written is noted, in order. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEVICES "/sys/bus/dsa/devices/"

static int attribute(int fd, char *path, size_t size)
{
    char link[64];
    ssize_t length;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, size - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strncmp(path, DEVICES, strlen(DEVICES)) == 0;
}

int openat(int directory, const char *name, int flags, ...)
{
    char path[4096];
    va_list more;
    int mode, fd;

    va_start(more, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    fd = syscall(SYS_openat, directory, name, flags, mode);
    if (fd >= 0 && (flags & O_ACCMODE) != O_RDONLY && attribute(fd, path, sizeof path) && ftruncate(fd, 0) != 0)
        abort();
    return fd;
}

int open(const char *name, int flags, ...)
{
    va_list more;
    int mode;

    va_start(more, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;
    va_end(more);
    return openat(AT_FDCWD, name, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t length)
{
    char path[4096], line[8192];
    const char *text = bytes, *name = getenv("ATTRIBUTES_WRITTEN");
    size_t stored = length;
    int notes, size;

    if (!attribute(fd, path, sizeof path))
        return syscall(SYS_write, fd, bytes, length);
    if (strcmp(strrchr(path, '/'), "/cmd_status") == 0) {
        text = "0x0";
        stored = 3;
    } else {
        notes = name ? syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
        size = snprintf(line, sizeof line, "%s %.*s\n", path + strlen(DEVICES), (int)length, text);
        if (notes < 0 || syscall(SYS_write, notes, line, (size_t)size) != size)
            abort();
        close(notes);
    }
    if (syscall(SYS_write, fd, text, stored) != (long)stored || syscall(SYS_write, fd, "\n", 1) != 1)
        abort();
    return length;
}
