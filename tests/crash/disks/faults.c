/* Makes writes and syncs of files below FAULTS_UNDER fail, as the file FAULTS_FILE says while the process runs.
 *
 * It holds "write ERRNO", "sync ERRNO" or "sync ERRNO lose"; empty or missing, nothing fails. Each fault adds a byte to
 * FAULTS_FILE.hits. "lose": as a kernel may, it drops what was written to a write-ahead log since its last sync.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static off_t unsynced_from = -1, unsynced_to;

static int below(int fd, char *path) {
  const char *under = getenv("FAULTS_UNDER");
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = under ? readlink(link, path, PATH_MAX - 1) : -1;
  if (length < 0) return 0;
  path[length] = 0;
  return strncmp(path, under, strlen(under)) == 0;
}

static int is_log(const char *path) {
  size_t length = strlen(path);
  return length > 4 && strcmp(path + length - 4, "-wal") == 0;
}

static void lose(int fd) {
  static const char zeros[4096];
  for (off_t at = unsynced_from; at >= 0 && at < unsynced_to; at += sizeof zeros) {
    size_t size = unsynced_to - at < (off_t)sizeof zeros ? (size_t)(unsynced_to - at) : sizeof zeros;
    if (syscall(SYS_pwrite64, fd, zeros, size, at) < 0) abort();
  }
}

static int fails(const char *what, int fd) {
  char path[PATH_MAX], text[64], kind[16] = "", how[16] = "", hits[PATH_MAX];
  const char *control = getenv("FAULTS_FILE");
  int number = 0;
  if (!control || !below(fd, path)) return 0;
  int file = open(control, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  text[length > 0 ? length : 0] = 0;
  if (sscanf(text, "%15s %d %15s", kind, &number, how) < 2 || strcmp(kind, what) != 0) return 0;
  if (strcmp(how, "lose") == 0 && is_log(path)) lose(fd);
  snprintf(hits, sizeof hits, "%s.hits", control);
  file = open(hits, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file >= 0) {
    syscall(SYS_write, file, "x", 1);
    close(file);
  }
  errno = number;
  return 1;
}

static void written(int fd, off_t at, ssize_t size) {
  char path[PATH_MAX];
  if (size <= 0 || !below(fd, path) || !is_log(path)) return;
  if (unsynced_from < 0 || at < unsynced_from) unsynced_from = at;
  if (at + size > unsynced_to) unsynced_to = at + size;
}

static int synced(int fd, int result) {
  char path[PATH_MAX];
  if (result == 0 && below(fd, path) && is_log(path)) unsynced_from = -1, unsynced_to = 0;
  return result;
}

ssize_t write(int fd, const void *data, size_t size) {
  return fails("write", fd) ? -1 : syscall(SYS_write, fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  if (fails("write", fd)) return -1;
  ssize_t result = syscall(SYS_pwrite64, fd, data, size, at);
  written(fd, at, result);
  return result;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

int fsync(int fd) { return fails("sync", fd) ? -1 : synced(fd, syscall(SYS_fsync, fd)); }

int fdatasync(int fd) { return fails("sync", fd) ? -1 : synced(fd, syscall(SYS_fdatasync, fd)); }
