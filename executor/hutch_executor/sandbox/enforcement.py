"""Makes a planned sandbox: bubblewrap with a seccomp filter, or Landlock with one. The plan is the same for both.

`enforce` returns what goes in front of a command. Each sandbox examines itself from inside before it becomes the
command (`_CHECK`): with a program that only looks like bubblewrap, or a kernel that does less than it said, nothing
runs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from hutch_executor.sandbox import confine, landlock, seccomp
from hutch_executor.sandbox.places import Access, is_inside
from hutch_executor.sandbox.plan import SandboxPlan
from hutch_executor.sandbox.programs import confine_argv
from hutch_executor.sandbox.supervisor import TRUNCATE, WATCHED, CallSupervisor
from hutch_shared.errors import HutchError, Reason

__all__ = ["Enforced", "abi_of", "enforce"]

_log: Final = logging.getLogger(__name__)

_NUMBER: Final = 32
"""Bytes of a message with a process id: each comes with a descriptor, so none is joined with the next."""
_CHECK: Final = """
refuse() { printf 'hutch: this command was not run: %s.\\n' "$1" >&2; exit 126; }
seen=0
while read -r name value rest; do
  case $name in
    NoNewPrivs:) [ "$value" = 1 ] || refuse 'the sandbox lets it gain privileges' ;;
    Seccomp:) [ "$value" = 2 ] || refuse 'the sandbox has no seccomp filter' ;;
    CapEff: | CapPrm:) case $value in *[!0]*) refuse 'it has capabilities in the sandbox' ;; esac ;;
    *) continue ;;
  esac
  seen=$((seen + 1))
done < /proc/self/status
[ "$seen" = 4 ] || refuse 'the sandbox does not show how it is confined'
if [ "$1" = bubblewrap ]; then
  [ $$ -lt 16 ] || refuse 'the sandbox shares its processes with the host'
  if [ "$2" != full ]; then
    seen=0
    while read -r name rest; do
      case $name in
        lo:*) seen=1 ;;
        *:*) refuse 'the sandbox shares the network with the host' ;;
      esac
    done < /proc/net/dev
    [ "$seen" = 1 ] || refuse 'the sandbox does not show its network'
  fi
fi
left=$3
shift 3
while [ "$left" -gt 0 ]; do
  if [ -d "$1" ]; then
    for entry in "$1"/* "$1"/.[!.]*; do
      if [ -e "$entry" ] || [ -L "$entry" ]; then refuse "$1 can be seen in the sandbox"; fi
    done
  elif { read -r line < "$1"; } 2>/dev/null && [ -n "$line" ]; then
    refuse "$1 can be seen in the sandbox"
  fi
  shift
  left=$((left - 1))
done
unset name value rest left entry line seen
exec "$@"
"""


class Enforced:
    """A sandbox that commands can be started in, one after the other. They inherit `descriptors`. Close it at the end.

    With Landlock its commands may change modes and owners, and open Unix sockets, until `close`: a thread answers them.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cwd: str,
        descriptors: Sequence[int],
        *,
        rewind: int | None = None,
        supervisors: _Supervisors | None = None,
        shown: Iterable[str] = (),
    ) -> None:
        self.argv = tuple(argv)
        """The command that makes the sandbox; the command to run inside goes after it."""
        self.cwd = cwd
        """The working directory in which it must be started."""
        self.descriptors = tuple(descriptors)
        self.shown = tuple(shown)
        """With Landlock, the paths that are shown with everything in them."""
        self._rewind = rewind
        self._supervisors = supervisors
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Enforced {self.argv[0]}{', closed' if self._is_closed else ''}>"

    def ready(self) -> None:
        """Make it ready for one more start. Call before each."""
        if self._rewind is not None:  # bubblewrap reads the filter to its end; the position belongs to all its readers
            os.lseek(self._rewind, 0, os.SEEK_SET)

    def close(self) -> None:
        """Close its descriptors and end its thread. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._supervisors is not None:
            self._supervisors.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def abi_of() -> int:
    """Return the Landlock ABI in use: the kernel's, or the newest that Hutch knows. 0 without Landlock."""
    return min(confine.landlock_abi(), landlock.NEWEST)


def enforce(plan: SandboxPlan, *, sockets: bool, abi: int | None = None) -> Enforced:
    """Make the sandbox. `isolation_unavailable`, with the reason, if that is not possible here. Blocks for a moment.

    Under Landlock a command opens Unix sockets with `sockets` only, and no process that it starts does. With bubblewrap
    all of them may, and reach the sockets that are shown. `abi` is the Landlock ABI to use.
    """
    known = seccomp.native_abi()
    if known is None:
        raise _unavailable(f"No seccomp filter is possible: {seccomp.unavailable()}")
    hidden = _wholly_hidden(plan.places)
    check = ("/bin/sh", "-c", _CHECK, "hutch", plan.kind, plan.network, str(len(hidden)), *hidden)
    try:
        if plan.kind == "bubblewrap":
            filter_file = os.memfd_create("hutch-seccomp", os.MFD_CLOEXEC)
            os.write(filter_file, seccomp.assemble((*seccomp.agent_rules(), *seccomp.mode_rules()), known))
            return Enforced((*plan.argv(filter_file), *check), plan.cwd, (filter_file,), rewind=filter_file)
        return _enforce_landlock(plan, known, check, sockets=sockets, abi=abi_of() if abi is None else abi)
    except OSError as error:
        raise _unavailable(f"The kernel refuses the sandbox: {error.strerror}") from error


def _enforce_landlock(
    plan: SandboxPlan, known: seccomp.Abi, check: Sequence[str], *, sockets: bool, abi: int
) -> Enforced:
    if abi < 1:
        raise _unavailable("The kernel has no Landlock, or it is off (see `lsm=` in the kernel's command line)")
    if plan.network == "allow-list":
        raise _unavailable('Landlock cannot limit the network to an allow-list; use network = "broker-only"')
    network = plan.network == "full"
    rules = [*seccomp.agent_rules(network=network), *seccomp.landlock_rules()]
    rules += seccomp.file_rules(truncates=landlock.truncates(abi))
    rules += seccomp.command_rules(supervised=sockets)
    rules += seccomp.watch_rules((*WATCHED, *(TRUNCATE if landlock.truncates(abi) else ())))
    rights = landlock.rules_for(plan.places)
    ruleset = landlock.make_ruleset(rights, network=network, abi=abi)
    try:
        supervisors = _Supervisors([path for path, access in plan.places.items() if access == "write"])
    except (OSError, RuntimeError) as error:  # RuntimeError: the session may start no more threads
        os.close(ruleset)
        raise _unavailable(f"The supervisor of the sandbox cannot be started: {error}") from error
    program = confine_argv(seccomp.assemble(rules, known), ruleset, supervisors.given)
    descriptors = (ruleset, supervisors.given)
    shown = landlock.shown_whole(rights)
    return Enforced((*program, *check), plan.cwd, descriptors, supervisors=supervisors, shown=shown)


def _wholly_hidden(places: Mapping[str, Access]) -> list[str]:
    """Return the hidden places in which nothing is shown."""
    shown = [path for path, access in places.items() if access != "hidden"]
    hidden = [path for path, access in places.items() if access == "hidden"]
    return [path for path in hidden if not any(is_inside(one, path) for one in shown)]


class _Supervisors:
    """Takes the listeners of confined processes from a socket; each gets a supervisor until its processes are gone.

    Inside, `given` is closed before the command runs: no command can pass a listener of its own.
    """

    def __init__(self, writable: Sequence[str]) -> None:
        self._writable = writable
        self._ours, theirs = socket.socketpair()
        self.given = theirs.detach()
        """The descriptor that the confined program inherits. Its owner is `Enforced`."""
        self._serving: list[CallSupervisor] = []
        self._thread = threading.Thread(target=self._receive, name="hutch-supervisor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._ours.close()
            os.close(self.given)
            raise

    def __repr__(self) -> str:
        return f"<_Supervisors of {len(self._serving)} listeners>"

    def close(self) -> None:
        """End the threads."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ours.close()
        for one in self._serving:
            one.close()

    def _receive(self) -> None:
        with suppress(OSError):
            while True:
                data, passed, _, _ = socket.recv_fds(self._ours, _NUMBER, 1)
                if not data:
                    return
                for listener in passed:
                    try:
                        self._serving.append(CallSupervisor(listener, self._writable, int(data)))
                    except (OSError, RuntimeError) as error:  # the listener is closed: the command's calls fail
                        _log.warning("a command can change no mode and open no socket: %s", error)


def _unavailable(why: str) -> HutchError:
    return HutchError(Reason.ISOLATION_UNAVAILABLE, f"{why}.")
