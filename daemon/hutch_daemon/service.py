"""The protocol with a service manager such as systemd: sd_notify(3), sd_listen_fds(3), sd_watchdog(3).

Its variables are removed from the environment at once, so that the processes that hutchd starts cannot send
notifications in its name or use its sockets. Without a service manager everything here does nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import anyio

from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason

__all__ = ["VARIABLES", "Service", "take"]

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
NAMES: Final = ("client", "executor")

_log: Final = logging.getLogger(__name__)
_FIRST: Final = 3
_SEND: Final = 1.0


@dataclass(slots=True)
class Service:
    """The service manager's address, and the `sockets` (by name) and `watchdog` time (seconds) that it passed."""

    address: str = ""
    watchdog: float | None = None
    sockets: dict[str, int] = field(default_factory=dict)
    _conditions: Conditions = field(default_factory=lambda: Conditions(_log), repr=False, compare=False)

    def say(self, *lines: str) -> None:
        """Send `NAME=value` lines. Blocks at most a second. If the manager does not listen, only log a warning."""
        if not self.address:
            return
        address = f"\0{self.address[1:]}" if self.address[0] == "@" else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(_SEND)
            try:
                line.sendto("\n".join(lines).encode(), address)
            except OSError as error:
                self._conditions.begin("manager", f"the service manager does not listen: {error}")
            else:
                self._conditions.end("manager", "the service manager listens again")

    def status(self, *words: str) -> str:
        """Return the line that shows these words in `systemctl status`."""
        return f"STATUS={' '.join(' '.join(words).split())}"

    def reloading(self) -> None:
        """Notify the manager that the settings are being read again. `READY=1` must follow."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    async def beat(self, lives: Callable[[], bool]) -> None:
        """Notify the watchdog twice per watchdog time while `lives` returns True. Return when it returns False."""
        if self.watchdog is None or not self.address:
            return
        while lives():
            self.say("WATCHDOG=1")
            await anyio.sleep(self.watchdog / 2)


def take(environ: MutableMapping[str, str] = os.environ, pid: int | None = None, first: int = _FIRST) -> Service:
    """Remove the service manager's variables from `environ`, and return those for process `pid` (by default, this one).

    The passed sockets are the descriptors from `first` on. HutchError INVALID_PARAMS if a socket has a name that hutchd
    does not know. Their types are checked later (`hutch_shared.unix.take_over`).
    """
    given = {name: environ.pop(name, "") for name in VARIABLES}
    own = str(os.getpid() if pid is None else pid)
    service = Service(given["NOTIFY_SOCKET"] if given["NOTIFY_SOCKET"][:1] in ("/", "@") else "")
    with suppress(ValueError):
        if given["WATCHDOG_PID"] in ("", own) and (watchdog := int(given["WATCHDOG_USEC"] or 0)) > 0:
            service.watchdog = watchdog / 1_000_000
    if given["LISTEN_PID"] != own:
        return service
    names = given["LISTEN_FDNAMES"].split(":") if given["LISTEN_FDNAMES"] else []
    count = int(given["LISTEN_FDS"]) if given["LISTEN_FDS"].isdecimal() else 0
    for at in range(count):
        try:
            os.set_inheritable(first + at, False)
        except OSError:
            raise HutchError(
                Reason.INVALID_PARAMS, f"LISTEN_FDS={count}, but descriptor {first + at} is not open."
            ) from None
        name = names[at] if at < len(names) else ""
        if name not in NAMES or name in service.sockets:
            raise HutchError(
                Reason.INVALID_PARAMS,
                f"The service manager passed a socket named {name!r}; hutchd takes one named client and one named"
                " executor (FileDescriptorName= in the socket units).",
            )
        service.sockets[name] = first + at
    return service
