/* Lets the wall clock jump: the file CLOCK_FILE holds how many seconds it is ahead. The monotonic clock stays true. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
  const char *path = getenv("CLOCK_FILE");
  char text[32];
  int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  long length = syscall(SYS_read, file, text, sizeof text - 1);
  syscall(SYS_close, file);
  text[length > 0 ? length : 0] = 0;
  return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  if (now) *now = time.tv_sec;
  return time.tv_sec;
}
