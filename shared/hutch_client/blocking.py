"""The blocking client: sends one request at a time on a socket and waits for the answer.

Most commands use this client because it starts fast: it imports JSON and sockets only. Records stay JSON objects, since
the commands only print them (`hutch_shared.messages` has their types; members with default values are left out).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from hutch_shared import __version__
from hutch_shared.errors import HutchError, Reason

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PROTOCOL", "BlockingConnection"]

PROTOCOL: Final = 1
"""Equal to `messages.PROTOCOL`. Importing that module would take longer than the whole command."""

_FRAME_LIMIT: Final = 64 << 20
_NOT_HUTCH: Final = "The server does not speak Hutch's protocol. Look at `hutch version`."
_LOST: Final = "hutchd closed the connection before it answered. Look at `hutch daemon logs`."


class BlockingConnection:
    """A connection after the greeting, as a context manager that closes it. Not thread-safe."""

    def __init__(self, path: Path | None = None, *, timeout: float = 60.0) -> None:
        """Dial `path` (default: `endpoint.socket_path()`) and agree on the protocol. Each wait lasts ≤ `timeout` s.

        HutchError CONNECTION_LOST, with the reason, if hutchd does not answer while `endpoint.GreetingWatch` waits.
        """
        from hutch_client.endpoint import dial, socket_path  # late: not needed for `-h`

        path = path or socket_path()
        self._line = dial(path)
        self._timeout = timeout
        self._received = self._line.makefile("rb")
        self._number = 0
        self.server: dict[str, Any] = {}
        """hutchd's greeting: a `messages.Version`."""
        try:
            greeting = {"protocol": PROTOCOL, "client": f"hutch {__version__}", "waiting_state": True}
            with self._waiting("get_version"):
                self._ask("get_version", greeting)
                self._await_greeting(path)
                self._line.settimeout(timeout)
                self.server = self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises HutchError: hutchd's error; CONNECTION_LOST if the connection ended; TIMED_OUT if no answer came.
        """
        with self._waiting(method):
            self._ask(method, params)
            return self._answer()

    def server_pid(self) -> int:
        """Return hutchd's pid, as the kernel reports it here; 0 if it is in a pid namespace that is not visible."""
        from hutch_shared.processes import peer_credentials

        try:
            return peer_credentials(self._line).pid
        except HutchError:
            return 0

    def wait_closed(self, timeout: float) -> bool:
        """Wait until hutchd closes the connection; False after `timeout` seconds without any data."""
        self._line.settimeout(timeout)
        try:
            while self._received.readline(_FRAME_LIMIT):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass  # a reset is an end too
        return True

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._received.close()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _waiting(self, method: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise HutchError(Reason.TIMED_OUT, f"hutchd did not answer `{method}` in {self._timeout:g} s.") from None
        except OSError:
            raise HutchError(Reason.CONNECTION_LOST, _LOST) from None

    def _await_greeting(self, path: Path) -> None:
        from select import select

        from hutch_client.endpoint import GREETING, GreetingWatch, not_greeted

        watch = GreetingWatch(self._line)
        while not select([self._line], [], [], GREETING)[0]:
            if not watch.goes_on():
                raise not_greeted(path, self._line, watch.waited)

    def _ask(self, method: str, params: dict[str, Any]) -> None:
        self._number += 1
        self._send({"jsonrpc": "2.0", "method": method, "params": params, "id": self._number})

    def _send(self, message: dict[str, Any]) -> None:
        self._line.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        """Return the result of the current call. Meanwhile answer pings and skip every other message."""
        while True:
            frame = self._received.readline(_FRAME_LIMIT)
            if not frame.endswith(b"\n"):
                raise HutchError(Reason.CONNECTION_LOST, _LOST)
            try:
                message: dict[str, Any] = json.loads(frame)
                if message.get("method") == "ping" and "id" in message:
                    self._send({"jsonrpc": "2.0", "result": {}, "id": message["id"]})
                elif "method" not in message and message["id"] in (self._number, None):
                    return _result(message)
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                raise HutchError(
                    Reason.PARSE_ERROR,
                    _NOT_HUTCH,
                ) from None


def _result(message: dict[str, Any]) -> dict[str, Any]:
    if "error" not in message:
        result: dict[str, Any] = message["result"]
        return result
    error = message["error"]
    details = dict(error.get("data") or {})
    try:
        reason = Reason(details.pop("reason", None))  # type: ignore[call-arg]  # look-up by value
    except ValueError:
        reason = Reason.INTERNAL
    raised = HutchError(reason, error["message"])
    raised.details = details
    raise raised
