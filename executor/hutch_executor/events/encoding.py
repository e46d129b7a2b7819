"""An event's bytes. Pure: a payload in, JSON that every reader accepts out.

One bad event would stop every event after it. So invalid text becomes U+FFFD, in `native` too. An event that is too
large or too deep for the wire loses its `native` message first, then becomes a `notice` that says so; a turn's end is
cut instead, since it must arrive.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hutch_shared.events import EventKind, Notice, TurnEnded
from hutch_shared.rpc.envelope import is_sound
from hutch_shared.text import read_lax_json, valid_value

__all__ = ["EVENT_LIMIT", "event_body"]

EVENT_LIMIT: Final = 30 << 20
"""Bytes of one event; the frame around it must stay below 32 MiB."""
_RESULT_LIMIT: Final = 1 << 20
"""Characters of a turn's result and of its message, when they must be cut."""
_IN_FRAME: Final = b"[[[{%b]]]"
"""The brackets around an event in its frame: the depth check counts them too."""

_encode: Final = msgspec.json.Encoder().encode


def event_body(kind: EventKind, data: msgspec.Struct, native: bytes | None) -> bytes:
    """Return the event from `"kind"` to its closing brace, on one line."""
    try:
        text = _encode(data)
    except UnicodeEncodeError:
        text = _encode(valid_value(msgspec.to_builtins(data)))
    if native is not None and (body := _sound(kind, text, b',"native":' + native)):
        return body
    if native is not None and (mended := _mended(native)) and (body := _sound(kind, text, b',"native":' + mended)):
        return body
    if body := _sound(kind, text, b""):
        return body
    if isinstance(data, TurnEnded):
        cut = {"result": (data.result or "")[:_RESULT_LIMIT], "message": data.message[:_RESULT_LIMIT]}
        return event_body(kind, msgspec.structs.replace(data, **cut), None)
    what = f"An event of kind {kind} ({len(text):,} bytes) is too large or too deeply nested to be passed on."
    return event_body("notice", Notice("event_left_out", what, {"kind": kind, "bytes": len(text)}), None)


def _sound(kind: EventKind, data: bytes, native: bytes) -> bytes | None:
    """Return the body, or None if it is too large, not JSON, or too deep for the wire."""
    if len(data) + len(native) > EVENT_LIMIT:
        return None
    body = b'"kind":"%b","data":%b%b}' % (kind.encode(), data, native)
    if is_sound(_IN_FRAME % body):
        return body.replace(b"\n", b" ")
    return None


def _mended(native: bytes) -> bytes | None:
    """Return the JSON of a lax writer as every reader accepts it, or None if it is not JSON."""
    if len(native) > EVENT_LIMIT:
        return None
    try:
        return _encode(valid_value(read_lax_json(native)))
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
