"""The reaper: a small parent above an executor that ends everything that the executor started, once it has ended.

Theory. The process forks before it has threads, secrets or descriptors of value. The child becomes the executor. The
parent becomes a subreaper and executes a shell with a short script, which holds nothing but one end of a pipe. The
kernel closes the other end when the executor ends, however it ends, and gives all its orphans to the reaper: also those
that forked twice or started a process session. The reaper kills its children round by round. Each round makes the
children of the killed ones its own. When two rounds in a row find only ended children, nothing is left.

The reaper's exit code says how the executor ended: the executor's own exit code, 128 and the signal, or 255 if this is
not known: the executor took seconds to end, a shell other than dash missed it, or the kernel does not show it. Newer
kernels, such as Linux 6.18.44, show to all but root the exit code 0 for every ended process that was not dumpable. So 0
counts only if the executor reported it. If the reaper itself is killed, the executor gets SIGTERM and ends in order;
see `run`.

A process that forks without end can stay ahead of the rounds, which then go on. Only a pid namespace or a cgroup ends
such a process for certain.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from hutch_shared.hardening import adopt_orphans, end_with_parent

__all__ = ["REAPER_OPTION", "Reaper", "fork_reaper"]

REAPER_OPTION: Final = "--reaper"
"""The option with which an environment that knows reapers starts an executor."""
_SHELLS: Final = ("/bin/dash", "/usr/bin/dash", "/bin/sh")
"""dash first: a reaper with it has 0.4 MiB of its own, one with bash 0.6 MiB."""
_KEPT_SIGNALS: Final = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCONT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
_SCRIPT: Final = r"""
read -r reported
executor=$1 code=255 quiet=0 round=0
while [ $quiet -lt 2 ]; do
  quiet=$((quiet + 1)) round=$((round + 1)) children=
  read -r children < /proc/$$/task/$$/children
  for pid in $children; do
    state=
    while read -r name state rest && [ "$name" != State: ]; do :; done < /proc/$pid/status
    set -- /proc/$pid/task/*
    case $state$# in
      [ZX]1) ;;
      *) kill -9 $pid && quiet=0 ;;
    esac
    if [ "$state" = Z ] && [ $pid = "$executor" ] && read -r line < /proc/$pid/stat; then
      set -- '' ${line##*) }
      shift 50
      executor= code=$(($1 & 127 ? 128 + ($1 & 127) : $1 >> 8))
      [ $code != 0 ] || code=${reported:-255}
    fi
  done
  if [ $quiet = 0 ] && [ $round -gt ${executor:+5}0 ]; then
    if [ -n "$executor" ] && [ $round -le 300 ]; then
      command eval '{ sleep 0.02 & } > /proc/$$/fd/0'
      command exec > /dev/null
      read -r line
    else
      [ $round -gt 300 ] && pause=1 || pause=0.02
      command eval 'sleep $pause'
    fi
  fi
done
exit $code
"""
"""A shell that waits for a program forgets how its other children ended. So until the executor was seen to have ended,
a pause lasts until a program that is not waited for ends, which closes the pipe. An executor that takes longer than a
few seconds to end gets longer pauses, with a wait.

`command` lets the script go on where no process can be started for the pause, or no file can be opened. A child of
which /proc shows nothing is killed: a /proc mounted with `hidepid` hides those that their own account may not inspect.
"""


class Reaper(NamedTuple):
    """The reaper above this process."""

    pid: int
    pipe: int
    """The descriptor of the pipe that the reaper reads to its end."""

    @property
    def is_gone(self) -> bool:
        """Whether the reaper has ended, so that nothing would end what this process starts."""
        return os.getppid() != self.pid

    def report_end(self, code: int) -> None:
        """Tell the reaper that this process now ends in order, with this exit code."""
        with suppress(OSError):  # the reaper is gone
            os.write(self.pipe, b"%d" % code)  # without a newline: the reaper waits until this process has ended


def fork_reaper() -> Reaper | None:
    """Fork, and return in the child. The parent becomes the reaper and does not return.

    Return None in the only process if the platform cannot have a reaper: outside Linux, without a shell, or if the
    kernel does not list children. Call it first, in a process with one thread; a process that was forked to become an
    executor may call it too. OSError if the system refuses a fork.
    """
    shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), None)
    children = Path("/proc/self/task", str(os.getpid()), "children")
    if sys.platform != "linux" or shell is None or not children.exists():
        return None
    watched, writable = os.pipe()
    held = os.fdopen(writable, "wb", 0)
    reaper = os.getpid()
    adopt_orphans()  # not inherited, and before there is an executor that could have orphans
    pid = os.fork()
    if pid:
        try:
            _become_reaper(shell, pid, watched)
        finally:
            os._exit(127)
    os.close(watched)
    os.register_at_fork(after_in_child=held.close)  # programs do not inherit it: so only this process has it
    end_with_parent()
    if os.getppid() != reaper:
        os._exit(127)
    return Reaper(reaper, writable)


def _become_reaper(shell: str, executor: int, watched: int) -> None:
    """Execute the script, without the executor's socket, its output, its environment and its working directory."""
    import signal

    os.chdir("/")
    os.dup2(watched, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    kept = {getattr(signal, name) for name in _KEPT_SIGNALS}
    for number in signal.valid_signals() - kept:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # otherwise the shell would reap the executor unseen
    os.execve(shell, [shell, "-c", _SCRIPT, "hutch-reaper", str(executor)], {"PATH": "/usr/bin:/bin"})  # noqa: S606
