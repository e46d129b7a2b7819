"""Names of accounts for the audit, found within a bounded time.

The system may ask a directory server for a name, and a dead one delays the answer by minutes. Transactions must not
wait for that: each look-up runs in a thread of its own, and after `WAIT` seconds the last known name is used.
"""

from __future__ import annotations

import pwd
from collections.abc import Callable
from threading import Thread
from typing import Final

__all__ = ["WAIT", "AccountNames"]

WAIT: Final = 0.2
"""Seconds to wait for a name."""


def _look_up(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


class AccountNames:
    """Call `name` from one thread at a time."""

    def __init__(self, look_up: Callable[[int], str | None] = _look_up, wait: float = WAIT) -> None:
        """`look_up(uid)` returns a name or None, in any time."""
        self._look_up = look_up
        self._wait = wait
        self._known: dict[int, str | None] = {}
        self._running: dict[int, Thread] = {}

    def name(self, uid: int) -> str | None:
        """Return the name of an account; None if it has none or if no look-up has answered yet.

        Blocks for at most `wait` seconds, and not at all while an earlier look-up of this uid hangs.
        """
        running = self._running.get(uid)
        if running is None or not running.is_alive():
            running = Thread(target=self._ask, args=(uid,), daemon=True, name="account-name")
            try:
                running.start()
            except RuntimeError:  # no thread can be started now
                return self._known.get(uid)
            running.join(self._wait)
            if running.is_alive():
                self._running[uid] = running
            else:
                self._running.pop(uid, None)
        return self._known.get(uid)

    def _ask(self, uid: int) -> None:
        self._known[uid] = self._look_up(uid)
