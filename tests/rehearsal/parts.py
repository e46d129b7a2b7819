"""The parts of a scripted model's reply, and the request as the script sees it.

A `Script` is a function from a `Request` to a reply: one part, or several in order. Parts before the first content
(`Say`, `Think`, `Use`) take effect before the response's head is sent. Parts are plain data; `stream` turns them into
the wire's events and `server` into bytes and accidents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import anyio

_ADDED = re.compile(r"<system-reminder>.*?</system-reminder>|\[Request interrupted by user[^\]]*\]", re.DOTALL)
_CWD = re.compile(r"Primary working directory: (.+)")


@dataclass(frozen=True, slots=True)
class Say:
    """Text in `chunks` deltas of nearly equal length (fewer if the text is shorter), `pace` seconds apart.

    A lone surrogate is sent as its JSON escape. `"\\ud83d\\ude00"` in two chunks is one character in two deltas.
    """

    text: str
    chunks: int = 1
    pace: float = 0.0


@dataclass(frozen=True, slots=True)
class Think:
    """A thinking block with a signature; `chunks` as in `Say`."""

    text: str
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Use:
    """A tool call. Several in one reply are parallel calls. The JSON of the input is sent in `chunks` deltas."""

    tool: str
    input: Mapping[str, Any]
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Odd:
    """An unusual line, by its name in `odd.ODD_LINES`, sent between two events; only a stream contains it."""

    name: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that the reply reports, in place of an estimate from lengths."""

    input: int
    output: int
    cache_read: int = 0
    cache_write: int = 0


@dataclass(frozen=True, slots=True)
class Replace:
    """Another value for a field of every event `event` of the stream; `path` leads to the field.

    `ABSENT` as the value leaves the field out. Events without the field stay as they are.
    """

    event: str
    path: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Refuse:
    """An API error: the HTTP status, or an `error` event that ends the stream if content comes before it.

    `kind` is the API's error type, by default the one that goes with `status`; `retry_after` is in seconds.
    """

    status: int
    kind: str | None = None
    retry_after: float | None = None
    message: str = "refused by the script"


@dataclass(frozen=True, slots=True)
class Drop:
    """A reset of the connection: here, or once `after_bytes` bytes of the response, its head included, are sent.

    With `after_bytes` its place in the reply does not matter: the other parts are cut. 0 sends nothing.
    """

    after_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """Silence for `seconds`, or until the client hangs up. Everything before it has been sent."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """Silence until the test sets `release`. `reached` is set once everything before it has been sent."""

    release: anyio.Event = field(default_factory=anyio.Event)
    reached: anyio.Event = field(default_factory=anyio.Event)


@dataclass(frozen=True, slots=True)
class Cut:
    """From here on the response is sent in writes of `size` bytes, each a chunk of its own.

    This splits UTF-8 anywhere.
    """

    size: int


ABSENT: Final = object()
Part = Say | Think | Use | Odd | Usage | Replace | Refuse | Drop | Stall | Pause | Cut
Reply = Part | Sequence[Part]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model made earlier in the conversation."""

    id: str
    tool: str
    input: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call. `text` joins its text blocks."""

    call: Call | None
    text: str
    is_error: bool


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _text(content: Any) -> str:
    return "\n".join(b["text"] for b in _blocks(content) if b.get("type") == "text")


def _said(message: dict[str, Any]) -> str:
    return _ADDED.sub("", _text(message["content"])).strip()


@dataclass(frozen=True)
class Request:
    """One request as it arrived, refused ones too. Header names are lower case; a repeated header is joined by `, `."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    peer_port: int
    raw: bytes = field(repr=False)
    body: Any = field(repr=False)

    @property
    def key(self) -> str | None:
        """The credential that the client sent, without the word `Bearer`."""
        bearer = self.headers.get("authorization", "")
        return self.headers.get("x-api-key") or (bearer[7:] if bearer[:7].lower() == "bearer " else None)

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation without the `system` messages that some clients insert; [] if it is malformed."""
        messages = self.body.get("messages") if isinstance(self.body, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
        ):
            return []
        return [m for m in messages if m["role"] != "system"]

    @property
    def is_side(self) -> bool:
        """Whether the request is the client's own: for a title, a quota check, or a page's summary by its small model.

        Such a request has no tools, and besides a single token, a prescribed form, or the small model.
        """
        body = self.body
        form = (body.get("output_config") or {}).get("format")
        return not body.get("tools") and (
            body.get("max_tokens") == 1 or bool(form) or "haiku" in str(body.get("model"))
        )

    @property
    def asks_agent(self) -> bool:
        """Return whether this is the next step of an agent's conversation."""
        return self.path.partition("?")[0] == "/v1/messages" and bool(self.messages) and not self.is_side

    @cached_property
    def calls(self) -> list[Call]:
        """All tool calls of the conversation, oldest first."""
        return [
            Call(b["id"], b["name"], b["input"])
            for m in self.messages
            if m["role"] == "assistant"
            for b in _blocks(m["content"])
            if b.get("type") == "tool_use"
        ]

    @cached_property
    def results(self) -> list[Result]:
        """All tool results of the conversation, oldest first."""
        calls = {str(c.id): c for c in self.calls}  # an odd event may have given a call an id of any type
        return [
            Result(calls.get(str(b["tool_use_id"])), _text(b.get("content")), bool(b.get("is_error")))
            for m in self.messages
            if m["role"] == "user"
            for b in _blocks(m["content"])
            if b.get("type") == "tool_result"
        ]

    @cached_property
    def fresh(self) -> list[Result]:
        """The tool results in the last message, to which the model replies."""
        last = _blocks(self.messages[-1]["content"]) if self.messages else []
        count = sum(b.get("type") == "tool_result" for b in last)
        return self.results[len(self.results) - count :]

    @cached_property
    def heard(self) -> str:
        """The text of the last message, without the client's additions. Empty if it has tool results only."""
        return _said(self.messages[-1]) if self.messages else ""

    @cached_property
    def prompt(self) -> str:
        """The user's latest text, even if it is not in the last message."""
        return next((said for m in reversed(self.messages) if m["role"] == "user" and (said := _said(m))), "")

    @cached_property
    def cwd(self) -> str:
        """The working directory that the client names, or `.`."""
        found = _CWD.search(_text(self.body.get("system"))) or _CWD.search(
            "\n".join(_text(m["content"]) for m in self.body["messages"])
        )
        return found[1] if found else "."


Script = Callable[[Request], Reply]
When = str | Callable[[Request], bool]


def anything(_: Request) -> bool:
    """A `when` that accepts every request."""
    return True


@dataclass(slots=True)
class Step:
    """A reply for requests that fit `when`, used `times` times (None: without limit).

    If `when` is text, it must occur in the last message: in a tool result or in the user's text.
    """

    when: When
    reply: Reply | Script
    times: int | None = 1

    def fits(self, request: Request) -> bool:
        """Return whether this step can answer the request."""
        if self.times == 0:
            return False
        if callable(self.when):
            return self.when(request)
        return self.when in request.heard or any(self.when in r.text for r in request.fresh)


class Steps:
    """A script as a list: the first unused step that fits answers; if none fits, the reply is 400 with the reason."""

    def __init__(self, *steps: Step | tuple[When, Reply | Script]) -> None:
        self.left = [s if isinstance(s, Step) else Step(*s) for s in steps]

    def __call__(self, request: Request) -> Reply:
        """Return the next reply; it counts as used even if the client hangs up."""
        for step in self.left:
            if step.fits(request):
                if step.times is not None:
                    step.times -= 1
                return step.reply(request) if callable(step.reply) else step.reply
        fresh = [r.text[:200] for r in request.fresh]
        return Refuse(400, message=f"the script has no step for {request.heard[:200]!r} with results {fresh!r}")

    def __repr__(self) -> str:
        return f"<Steps {sum(s.times != 0 for s in self.left)} of {len(self.left)} left>"
