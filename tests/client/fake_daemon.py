"""A fake hutchd for the client: the wire on a real Unix socket, with answers and events that a test prescribes.

It checks parameters and results against the methods table.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event, EventKind
from hutch_shared.methods import CLIENT

Answer = Callable[[Any], msgspec.Struct] | msgspec.Struct

SESSION = m.Session(
    id="s-0000000000000001",
    name="fix",
    agent="claude",
    cwd="/w",
    owner=1000,
    account="ann",
    state="open",
    created_at="2026-01-31T12:00:00.000Z",
    permission_mode="ask",
    when_nobody="wait",
    environment="same-user",
    isolation=m.Isolation("reduced", "no sandbox"),
    keys="exposed",
    journal="j-1",
    head_seq=0,
    turns=0,
    options=m.AgentOptions(),
)
TURN = m.Turn("t-0000000000000001", SESSION.id, 1, "queued", "fix it", "2026-01-31T12:00:00.000Z")
CALL = m.ToolCall("c1", "run_command", "Bash", {"command": "npm install"}, command="npm install")
PERMISSION = m.Permission(
    "p-0000000000000001", SESSION.id, TURN.id, "tool", "pending", "2026-01-31T12:00:01.000Z", CALL, "d1"
)


def event(seq: int, kind: EventKind, data: msgspec.Struct | dict[str, Any], *, turn: str | None = TURN.id) -> Event:
    """Return an event of SESSION, a second later for each number."""
    raw = msgspec.Raw(msgspec.json.encode(data))
    return Event(SESSION.id, seq, seq, f"2026-01-31T12:00:{seq % 60:02d}.000Z", kind, raw, turn)


class FakeDaemon:
    """Answers each call by `answers`: a result, or a function of the parameters that may raise HutchError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[tuple[str, Any]] = []
        self.greetings = 0
        self.pongs = 0
        self.answers: dict[str, Answer] = {
            "get_version": m.Version("0.1.0", m.PROTOCOL),
            "get_session": SESSION,
            "open_session": SESSION,
            "submit_prompt": TURN,
            "list_permissions": self._pending,
            "get_usage": m.UsageTable(()),
            "follow_events": self._follow,
        }
        self.events: list[Event] = []
        self.journal = "j-1"
        self.hang_up_after_answer = False
        self._lines: dict[socket.socket, m.FollowEvents | None] = {}
        self._changed = threading.Condition(threading.RLock())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._threads: list[threading.Thread] = []

    @contextmanager
    def serving(self) -> Iterator[FakeDaemon]:
        """Serve in threads while the body runs."""
        acceptor = threading.Thread(target=self._accept)
        acceptor.start()
        try:
            yield self
        finally:
            self._listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            self._listener.close()
            self.drop()
            for thread in self._threads:
                thread.join()

    def asked(self, method: str) -> list[Any]:
        """Return the parameters of the calls of `method` so far."""
        with self._changed:
            return [params for name, params in self.calls if name == method]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true. Checks it after each call and each event."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30)

    def publish(self, *events: Event) -> None:
        """Store events and send them to all followers."""
        with self._changed:
            self.events += events
            for line, follow in list(self._lines.items()):
                if follow is not None:
                    self._send_events(line, follow, events)

    def tell(self, method: str, params: msgspec.Struct) -> None:
        """Send a notification to all followers."""
        with self._changed:
            for line, follow in self._lines.items():
                if follow is not None:
                    self._send(line, {"jsonrpc": "2.0", "method": method, "params": params})

    def ping_all(self) -> None:
        """Ping every connection."""
        with self._changed:
            for line in self._lines:
                self._send(line, {"jsonrpc": "2.0", "method": "ping", "id": "ping-1"})

    def drop(self) -> None:
        """Cut all connections."""
        with self._changed:
            for line in self._lines:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _pending(self, params: m.ListPermissions) -> m.Permissions:
        """Return the permission requests that the events show as pending."""
        asked = [msgspec.json.decode(one.data) for one in self.events if one.kind == "permission_asked"]
        settled = [msgspec.json.decode(one.data) for one in self.events if one.kind == "permission_settled"]
        gone = {one["permission"] for one in settled}
        found = [msgspec.convert(one["permission"], m.Permission) for one in asked]
        return m.Permissions(tuple(one for one in found if one.id not in gone))

    def _follow(self, params: m.FollowEvents) -> m.Following:
        if params.journal not in (None, self.journal):
            raise HutchError(Reason.JOURNAL_REPLACED)
        return m.Following(7, self.journal, len(self.events))

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self._lines[line] = None
            self._threads.append(threading.Thread(target=self._serve, args=(line,)))
            self._threads[-1].start()

    def _serve(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as received, suppress(OSError):
            for frame in received:
                message = msgspec.json.decode(frame)
                with self._changed:
                    if "method" not in message:
                        self.pongs += 1
                    else:
                        self._answer(line, message)
                    self._changed.notify_all()
        with self._changed:
            del self._lines[line]

    def _answer(self, line: socket.socket, message: dict[str, Any]) -> None:
        method = CLIENT[message["method"]]
        params = msgspec.convert(message.get("params", {}), method.params)
        self.calls.append((method.name, params))
        try:
            if method.name not in self.answers:
                raise HutchError(Reason.METHOD_NOT_FOUND)  # the test gives this method no answer
            answer = self.answers[method.name]
            result = answer if isinstance(answer, msgspec.Struct) else answer(params)
        except HutchError as error:
            body = {
                "code": error.reason.code,
                "message": error.message,
                "data": {"reason": error.reason.word, **error.details},
            }
            self._send(line, {"jsonrpc": "2.0", "error": body, "id": message["id"]})
            return
        assert isinstance(result, method.result or msgspec.Struct)
        self._send(line, {"jsonrpc": "2.0", "result": result, "id": message["id"]})
        if self.hang_up_after_answer:
            line.shutdown(socket.SHUT_RDWR)
        elif isinstance(params, m.FollowEvents):
            follow = msgspec.structs.replace(params, after=len(self.events)) if params.after < 0 else params
            self._lines[line] = follow
            self._send_events(line, follow, self.events)

    def _send_events(self, line: socket.socket, follow: m.FollowEvents, events: Any) -> None:
        for one in events:
            if one.seq > follow.after and one.kind not in follow.skip:
                params = msgspec.structs.replace(one, follow=7)
                self._send(line, {"jsonrpc": "2.0", "method": "event", "params": params})

    def _send(self, line: socket.socket, message: dict[str, Any]) -> None:
        with suppress(OSError):
            line.sendall(msgspec.json.encode(message) + b"\n")
