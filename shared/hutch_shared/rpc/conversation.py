"""One connection's conversation, without I/O: frames in, events out; calls and answers in, frames out.

Both sides ask and answer. What is always true:

- An id that the other side has in flight is answered once, a notification never, and an answer is never answered.
- At most `pending` calls are in flight in each direction; one more is `overloaded` (a caller here gets it raised).
- What is wrong with one frame or batch member is told for it alone.
- An answer that nobody waits for any more is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw

from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import Method, Table
from hutch_shared.rpc import envelope
from hutch_shared.rpc.envelope import Batch, Fault, Id, Notification, Request, Response
from hutch_shared.rpc.frames import OVERSIZED

__all__ = ["PENDING", "Answered", "Asked", "Conversation", "Dropped", "Event", "Say", "Ticket", "Told", "read_params"]

PENDING: Final = 256


@dataclass(slots=True, eq=False)
class _Gathering:
    """The answers of one batch, until all are there."""

    outstanding: int = 0
    answers: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to answer one request, once."""

    id: Id
    gathering: _Gathering | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The other side asks; give the answer to `Conversation.answer` with this ticket."""

    ticket: Ticket
    request: Request


@dataclass(frozen=True, slots=True)
class Told:
    """A notification with its parameters as the table types them; those of one connection come in order."""

    method: Method
    params: Any


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to call `id` of this side: the result as the table types it, or a HutchError."""

    id: int
    outcome: Any


@dataclass(frozen=True, slots=True)
class Say:
    """A frame that must go out."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something came that may not be answered and cannot be used; for the log."""

    why: str


Event = Asked | Told | Answered | Say | Dropped
_Single = Request | Notification | Response | Fault


class Conversation:
    """The state of both directions: ids in flight, batches that are being answered."""

    def __init__(self, takes: Table, sends: Table, pending: int = PENDING) -> None:
        """Understand the methods of `takes`, call those of `sends`."""
        self._told = {row.name: row for row in takes.values() if row.kind == "notification"}
        self._hot = tuple(
            (b'{"jsonrpc":"2.0","method":"%b","params":' % row.name.encode(), row, msgspec.json.Decoder(row.params))
            for row in takes.values()
            if row.hot
        )
        self._sends = sends
        self._results = {row.name: msgspec.json.Decoder(row.result) for row in sends.values() if row.result}
        self._pending = pending
        self._asked: set[Id] = set()
        self._calls: dict[int, str] = {}
        self._last_id = 0

    # ------------------------------------------------------------ what comes in

    def receive(self, frame: bytes | Literal["oversized"]) -> list[Event]:
        """Return what `frame` means, in order."""
        if frame == OVERSIZED:
            return self._events([Fault(Reason.FRAME_TOO_LARGE, Reason.FRAME_TOO_LARGE.sentence)], None)
        assert isinstance(frame, bytes)
        for prefix, method, decoder in self._hot:
            if frame.startswith(prefix) and (told := _straight(frame, prefix, method, decoder)):
                return [told]
        message = envelope.parse(frame)
        if not isinstance(message, Batch):
            return self._events([message], None)
        gathering = _Gathering(outstanding=1)
        events = self._events(message.members, gathering)
        answers = self._gather(gathering, None)
        return events if answers is None else [*events, Say(answers)]

    def _events(self, messages: Iterable[_Single], gathering: _Gathering | None) -> list[Event]:
        events: list[Event] = []
        for message in messages:
            event = self._event(message, gathering)
            if not isinstance(event, Say):
                events.append(event)
            elif gathering is None:
                events.append(Say(envelope.end_line(event.frame)))
            else:
                gathering.answers.append(event.frame)
        return events

    def _event(self, message: _Single, gathering: _Gathering | None) -> Event:
        """Return the one event that a message is; a `Say` has no end of line yet."""
        match message:
            case Request(id=number):
                if number in self._asked:
                    return self._refuse(Fault(Reason.INVALID_REQUEST, f"The id {number!r} is in flight already."))
                if len(self._asked) >= self._pending:
                    return self._refuse(Fault(Reason.OVERLOADED, Reason.OVERLOADED.sentence, number))
                self._asked.add(number)
                if gathering is not None:
                    gathering.outstanding += 1
                return Asked(Ticket(number, gathering), message)
            case Notification():
                return self._tell(message)
            case Response():
                return self._settle(message)
            case Fault():
                return self._refuse(message)

    def _tell(self, message: Notification) -> Event:
        method = self._told.get(message.method)
        if method is None:
            return Dropped(f"no notification is named {message.method[:80]!r}")
        try:
            return Told(method, read_params(method, message.params))
        except HutchError as error:
            return Dropped(f"{method.name}: {error}")

    def _settle(self, message: Response) -> Event:
        name = self._calls.pop(message.id, None) if isinstance(message.id, int) else None
        if name is None:
            if message.error is not None and message.id is None:
                return Dropped(f"the other side could not read a message: {message.error.message[:200]}")
            return Dropped("an answer that nobody waits for")
        assert isinstance(message.id, int)
        if message.error is not None:
            return Answered(message.id, message.error.as_error())
        assert message.result is not None
        try:
            return Answered(message.id, self._results[name].decode(message.result))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Answered(message.id, HutchError(Reason.INTERNAL, f"The answer to {name} cannot be read: {error}"))

    @staticmethod
    def _refuse(fault: Fault) -> Say | Dropped:
        if fault.id is UNSET:
            return Dropped(fault.message)
        return Say(envelope.encode_error(fault.id, HutchError(fault.reason, fault.message)))

    # ------------------------------------------------------------ what goes out

    @property
    def asked(self) -> int:
        """How many requests of the other side wait for their answer."""
        return len(self._asked)

    def answer(self, ticket: Ticket, outcome: Any) -> bytes | None:
        """Return the frame that answers (a HutchError is an error); None while other members of its batch are out.

        TypeError when the outcome has no JSON form: the ticket stays good.
        """
        if isinstance(outcome, HutchError):
            answer = envelope.encode_error(ticket.id, outcome)
        else:
            answer = envelope.encode_result(ticket.id, outcome)
        self._asked.remove(ticket.id)
        if ticket.gathering is None:
            return envelope.end_line(answer)
        return self._gather(ticket.gathering, answer)

    @staticmethod
    def _gather(gathering: _Gathering, answer: bytes | None) -> bytes | None:
        if answer is not None:
            gathering.answers.append(answer)
        gathering.outstanding -= 1
        if gathering.outstanding or not gathering.answers:
            return None
        return envelope.end_line(b"[%b]" % b",".join(gathering.answers))

    def call(self, name: str, params: msgspec.Struct | None) -> tuple[int, bytes]:
        """Return the id and the frame of a call. Raises `overloaded` when too many wait for their answer."""
        self._check(name, "request", params)
        if len(self._calls) >= self._pending:
            raise HutchError(Reason.OVERLOADED)
        self._last_id += 1
        frame = envelope.encode_request(self._last_id, name, params)
        self._calls[self._last_id] = name
        return self._last_id, frame

    def notify(self, name: str, params: msgspec.Struct | None) -> bytes:
        """Return the frame of a notification."""
        self._check(name, "notification", params)
        return envelope.encode_notification(name, params)

    def forget(self, number: int) -> None:
        """Nobody waits for call `number` any more: its answer will be dropped."""
        self._calls.pop(number, None)

    def _check(self, name: str, kind: Literal["request", "notification"], params: msgspec.Struct | None) -> None:
        """A wrong call of our own is a bug, not the other side's fault."""
        row = self._sends[name]
        assert row.kind == kind, f"{name} is a {row.kind}"
        assert params is None or isinstance(params, row.params), f"{name} takes {row.params.__name__}"

    def __repr__(self) -> str:
        return f"<Conversation asked {len(self._asked)}, calls {len(self._calls)}>"


def _straight(frame: bytes, prefix: bytes, method: Method, decoder: msgspec.json.Decoder[Any]) -> Told | None:
    """Decode a hot notification as our own peers write it: what stands between prefix and `}` is one value, no more.

    Returns None when it is anything else; then it goes the general way, where the fault is found.
    """
    if envelope.text_fault(frame) is not None:
        return None
    try:
        return Told(method, decoder.decode(memoryview(frame)[len(prefix) : -1])) if frame.endswith(b"}") else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_params(method: Method, params: Raw | None) -> Any:
    """Return the parameters as `method` types them; an array gives the fields in their order.

    Raises `invalid_params` with what is wrong and where.
    """
    try:
        if params is None:
            return msgspec.json.decode(b"{}", type=method.params)
        if method.control and envelope.has_duplicate_keys(params):
            raise HutchError(Reason.INVALID_PARAMS, f"The parameters of {method.name} have a key twice.")
        if bytes(params)[:1] == b"[":
            fields = method.params.__struct_encode_fields__
            given = msgspec.json.decode(params, type=list[Raw])
            if len(given) > len(fields):
                raise HutchError(Reason.INVALID_PARAMS, f"{method.name} takes at most {len(fields)} parameters.")
            params = Raw(msgspec.json.encode(dict(zip(fields, given, strict=False))))
        return msgspec.json.decode(params, type=method.params)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HutchError(Reason.INVALID_PARAMS, f"{method.name}: {error}") from None
