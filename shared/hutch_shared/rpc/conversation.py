"""The protocol of one connection, without I/O: frames in, events out; calls and answers in, frames out.

Both sides may call each other. Invariants:

- Each request in flight is answered once; notifications and answers are never answered.
- At most `pending` calls are in flight in each direction. A further one gets `overloaded`, raised for a caller here.
- An error in one frame or batch member affects that one alone.
- An answer to a call that is no longer waiting is dropped.
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
from hutch_shared.rpc.envelope import Batch, EnvelopeFault, Id, Notification, Request, Response
from hutch_shared.rpc.stream import OVERSIZED

__all__ = [
    "PENDING",
    "Conversation",
    "Event",
    "MessageDropped",
    "NotificationReceived",
    "RequestReceived",
    "ResponseReceived",
    "SendFrame",
    "Ticket",
    "read_params",
]

PENDING: Final = 256


@dataclass(slots=True, eq=False)
class _BatchReply:
    """The answers to one batch; complete when none is outstanding."""

    outstanding: int = 0
    answers: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to answer one request, once."""

    id: Id
    batch: _BatchReply | None = None


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The peer calls a method; pass the outcome and this ticket to `Conversation.answer`."""

    ticket: Ticket
    request: Request


@dataclass(frozen=True, slots=True)
class NotificationReceived:
    """A notification with its parameters as the table types them, in the order of sending."""

    method: Method
    params: Any


@dataclass(frozen=True, slots=True)
class ResponseReceived:
    """The answer to our call `id`: the result as the table types it, or a HutchError."""

    id: int
    outcome: Any


@dataclass(frozen=True, slots=True)
class SendFrame:
    """A frame to send."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class MessageDropped:
    """A message that cannot be used and must not be answered; `why` is for the log."""

    why: str


Event = RequestReceived | NotificationReceived | ResponseReceived | SendFrame | MessageDropped
_Single = Request | Notification | Response | EnvelopeFault


class Conversation:
    """The state of both directions: ids in flight and batches being answered."""

    def __init__(self, takes: Table, sends: Table, pending: int = PENDING) -> None:
        """Accept the methods of `takes`; call those of `sends`."""
        self._notifications = {row.name: row for row in takes.values() if row.kind == "notification"}
        self._hot = tuple(
            (b'{"jsonrpc":"2.0","method":"%b","params":' % row.name.encode(), row, msgspec.json.Decoder(row.params))
            for row in takes.values()
            if row.hot
        )
        self._sends = sends
        self._results = {row.name: msgspec.json.Decoder(row.result) for row in sends.values() if row.result}
        self._pending = pending
        self._in_flight: set[Id] = set()
        self._calls: dict[int, str] = {}
        self._last_id = 0

    # ------------------------------------------------------------ incoming

    def receive(self, frame: bytes | Literal["oversized"]) -> list[Event]:
        """Return the events of `frame`, in order."""
        if frame == OVERSIZED:
            return self._events([EnvelopeFault(Reason.FRAME_TOO_LARGE, Reason.FRAME_TOO_LARGE.sentence)], None)
        assert isinstance(frame, bytes)
        for prefix, method, decoder in self._hot:
            if frame.startswith(prefix) and (notification := _decode_hot(frame, prefix, method, decoder)):
                return [notification]
        message = envelope.parse(frame)
        if not isinstance(message, Batch):
            return self._events([message], None)
        batch = _BatchReply(outstanding=1)
        events = self._events(message.members, batch)
        answers = self._add_to_batch(batch, None)
        return events if answers is None else [*events, SendFrame(answers)]

    def _events(self, messages: Iterable[_Single], batch: _BatchReply | None) -> list[Event]:
        events: list[Event] = []
        for message in messages:
            event = self._event(message, batch)
            if not isinstance(event, SendFrame):
                events.append(event)
            elif batch is None:
                events.append(SendFrame(envelope.end_line(event.frame)))
            else:
                batch.answers.append(event.frame)
        return events

    def _event(self, message: _Single, batch: _BatchReply | None) -> Event:
        """Return the event of one message; a `SendFrame` has no `\\n` yet."""
        match message:
            case Request(id=number):
                if number in self._in_flight:
                    return self._reject(
                        EnvelopeFault(Reason.INVALID_REQUEST, f"The id {number!r} is in flight already.")
                    )
                if len(self._in_flight) >= self._pending:
                    return self._reject(EnvelopeFault(Reason.OVERLOADED, Reason.OVERLOADED.sentence, number))
                self._in_flight.add(number)
                if batch is not None:
                    batch.outstanding += 1
                return RequestReceived(Ticket(number, batch), message)
            case Notification():
                return self._receive_notification(message)
            case Response():
                return self._receive_response(message)
            case EnvelopeFault():
                return self._reject(message)

    def _receive_notification(self, message: Notification) -> Event:
        method = self._notifications.get(message.method)
        if method is None:
            return MessageDropped(f"no notification is named {message.method[:80]!r}")
        try:
            return NotificationReceived(method, read_params(method, message.params))
        except HutchError as error:
            return MessageDropped(f"{method.name}: {error}")

    def _receive_response(self, message: Response) -> Event:
        name = self._calls.pop(message.id, None) if isinstance(message.id, int) else None
        if name is None:
            if message.error is not None and message.id is None:
                return MessageDropped(f"the peer could not read a message: {message.error.message[:200]}")
            return MessageDropped("an answer without a call in flight")
        assert isinstance(message.id, int)
        if message.error is not None:
            return ResponseReceived(message.id, message.error.as_error())
        assert message.result is not None
        try:
            return ResponseReceived(message.id, self._results[name].decode(message.result))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return ResponseReceived(
                message.id, HutchError(Reason.INTERNAL, f"The answer to {name} cannot be read: {error}")
            )

    @staticmethod
    def _reject(fault: EnvelopeFault) -> SendFrame | MessageDropped:
        if fault.id is UNSET:
            return MessageDropped(fault.message)
        return SendFrame(envelope.encode_error(fault.id, HutchError(fault.reason, fault.message)))

    # ------------------------------------------------------------ outgoing

    @property
    def in_flight(self) -> int:
        """The number of the peer's requests not answered yet."""
        return len(self._in_flight)

    def answer(self, ticket: Ticket, outcome: Any) -> bytes | None:
        """Return the frame that answers, an error for a HutchError; None while members of its batch are outstanding.

        TypeError when the outcome has no JSON form; the ticket remains valid.
        """
        if isinstance(outcome, HutchError):
            answer = envelope.encode_error(ticket.id, outcome)
        else:
            answer = envelope.encode_result(ticket.id, outcome)
        self._in_flight.remove(ticket.id)
        if ticket.batch is None:
            return envelope.end_line(answer)
        return self._add_to_batch(ticket.batch, answer)

    @staticmethod
    def _add_to_batch(batch: _BatchReply, answer: bytes | None) -> bytes | None:
        if answer is not None:
            batch.answers.append(answer)
        batch.outstanding -= 1
        if batch.outstanding or not batch.answers:
            return None
        return envelope.end_line(b"[%b]" % b",".join(batch.answers))

    def call(self, name: str, params: msgspec.Struct | None) -> tuple[int, bytes]:
        """Return the id and the frame of a call; `overloaded` when too many calls are in flight."""
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
        """Drop the answer to call `number` when it arrives."""
        self._calls.pop(number, None)

    def _check(self, name: str, kind: Literal["request", "notification"], params: msgspec.Struct | None) -> None:
        """Assert that our own code calls the method as the table says."""
        row = self._sends[name]
        assert row.kind == kind, f"{name} is a {row.kind}"
        assert params is None or isinstance(params, row.params), f"{name} takes {row.params.__name__}"

    def __repr__(self) -> str:
        return f"<Conversation received {len(self._in_flight)}, calls {len(self._calls)}>"


def _decode_hot(
    frame: bytes, prefix: bytes, method: Method, decoder: msgspec.json.Decoder[Any]
) -> NotificationReceived | None:
    """Decode a hot notification in the form that our own peers write: prefix, one JSON value, `}`.

    Return None for any other form; the general path then parses it or reports its fault.
    """
    if envelope.text_fault(frame) is not None:
        return None
    try:
        return (
            NotificationReceived(method, decoder.decode(memoryview(frame)[len(prefix) : -1]))
            if frame.endswith(b"}")
            else None
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_params(method: Method, params: Raw | None) -> Any:
    """Return the parameters as `method` types them; an array holds the fields in order.

    `invalid_params` names the fault and its place.
    """
    try:
        if params is None:
            return msgspec.json.decode(b"{}", type=method.params)
        if method.control and envelope.has_duplicate_keys(params):
            raise HutchError(Reason.INVALID_PARAMS, f"The parameters of {method.name} have a duplicate key.")
        if bytes(params)[:1] == b"[":
            fields = method.params.__struct_encode_fields__
            given = msgspec.json.decode(params, type=list[Raw])
            if len(given) > len(fields):
                raise HutchError(Reason.INVALID_PARAMS, f"{method.name} takes at most {len(fields)} parameters.")
            params = Raw(msgspec.json.encode(dict(zip(fields, given, strict=False))))
        return msgspec.json.decode(params, type=method.params)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HutchError(Reason.INVALID_PARAMS, f"{method.name}: {error}") from None
