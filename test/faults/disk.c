/*
 * Faults of a disk, for LD_PRELOAD. Concerns files whose path contains $DISK_FAULT_WORD. Which fault
 * is present stands in the file $DISK_FAULT_CONTROL, read at each call:
 *
 *   eio-fsync        fsync and fdatasync fail with EIO
 *   enospc-write     write, pwrite and ftruncate fail with ENOSPC
 *   slow-fsync MS    fsync and fdatasync take MS milliseconds longer
 *
 * Anything else, or no file: no fault.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int concerns(int fd) {
  const char *word = getenv("DISK_FAULT_WORD");
  char link[64], path[4096];
  if (word == NULL) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return strstr(path, word) != NULL;
}

/* Whether `mode` is the present fault; *ms is its number, where it has one. */
static int present(int fd, const char *mode, int *ms) {
  const char *control = getenv("DISK_FAULT_CONTROL");
  int saved = errno, found = 0;
  char text[64], name[32];
  if (control == NULL) return 0;
  int in = open(control, O_RDONLY | O_CLOEXEC);
  if (in >= 0) {
    ssize_t length = read(in, text, sizeof text - 1);
    close(in);
    text[length < 0 ? 0 : length] = '\0';
    found = sscanf(text, "%31s %d", name, ms) >= 1 && strcmp(name, mode) == 0 && concerns(fd);
  }
  errno = saved;
  return found;
}

static int fsync_fault(int fd) {
  int ms = 0;
  if (present(fd, "eio-fsync", &ms)) {
    errno = EIO;
    return -1;
  }
  if (present(fd, "slow-fsync", &ms)) {
    struct timespec delay = {ms / 1000, (ms % 1000) * 1000000L};
    while (nanosleep(&delay, &delay) != 0 && errno == EINTR) {
    }
  }
  return 0;
}

static int write_fault(int fd) {
  int ms = 0;
  if (!present(fd, "enospc-write", &ms)) return 0;
  errno = ENOSPC;
  return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) { return fsync_fault(fd) ? -1 : REAL(fsync)(fd); }

int fdatasync(int fd) { return fsync_fault(fd) ? -1 : REAL(fdatasync)(fd); }

ssize_t write(int fd, const void *bytes, size_t count) {
  return write_fault(fd) ? -1 : REAL(write)(fd, bytes, count);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) {
  return write_fault(fd) ? -1 : REAL(pwrite)(fd, bytes, count, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at) {
  return write_fault(fd) ? -1 : REAL(pwrite64)(fd, bytes, count, at);
}

int ftruncate(int fd, off_t length) { return write_fault(fd) ? -1 : REAL(ftruncate)(fd, length); }

int ftruncate64(int fd, off64_t length) {
  return write_fault(fd) ? -1 : REAL(ftruncate64)(fd, length);
}
