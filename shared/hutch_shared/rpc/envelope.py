"""From the bytes of one frame to a typed message, and back.

Theory. A relay must not decode a payload twice, and a trust boundary must not rely on a lenient decoder. So the decoder
skips the payload (params, result) and checks only its grammar; this module checks the rest in a few fast passes:

- UTF-8, depth, and numbers that break readers (integers over 400 digits, floats that overflow to infinity). A frame of
  usual size is decoded once and discarded, the fastest check there is. Decoding a large frame could take twenty times
  its size in memory, so a large frame is scanned instead: UTF-8 in slices, the rest in the *skeleton*, the text without
  its strings. Each pass removes the innermost pairs of brackets; what remains after DEPTH_LIMIT passes is too deep.
  Substring searches find the numbers.
- Duplicate members of the envelope. If a frame is exactly as long as the shortest spelling of its decoded members, it
  holds nothing else: one comparison. A frame with blanks or another spelling takes the slow path, which compares the
  sum of the members' own bytes without blanks.
- Duplicate keys in parameters. The skeleton has one colon per member. Decoding to dicts and encoding again drops
  duplicates, so the two counts of colons differ.

Invariant: every returned message has passed all checks. An `EnvelopeFault` says which check failed and whether the
frame may be answered.
"""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from hutch_shared.errors import HutchError, Reason
from hutch_shared.text import valid_value

__all__ = [
    "BATCH_LIMIT",
    "DEPTH_LIMIT",
    "DIGITS_LIMIT",
    "ID_LIMIT",
    "Batch",
    "EnvelopeFault",
    "Id",
    "Message",
    "Notification",
    "Request",
    "Response",
    "WireError",
    "encode_error",
    "encode_notification",
    "encode_request",
    "encode_result",
    "end_line",
    "has_duplicate_keys",
    "is_sound",
    "parse",
    "text_fault",
]

Id = int | str

BATCH_LIMIT: Final = 50
DEPTH_LIMIT: Final = 64
DIGITS_LIMIT: Final = 400
ID_LIMIT: Final = 2**53

_USUAL: Final = 1 << 18
_SLICE: Final = 1 << 16
_LARGEST: Final = 10**DIGITS_LIMIT - 1
_BLANKS: Final = b" \t\r\n"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_AS_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_AS_ZEROS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_TOO_MANY_DIGITS: Final = b"0" * (DIGITS_LIMIT + 1)
_MAYBE_INFINITE: Final = (b"0e000", b"0" * 200)
_BY_WORD: Final = {reason.word: reason for reason in Reason}
_BY_CODE: Final = {reason.code: reason for reason in Reason}
_FLOAT: Final = re.compile(rb"[0-9]++(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+")


class WireError(msgspec.Struct, frozen=True):
    """The `error` member of a response."""

    code: int
    message: str
    data: Raw | UnsetType = UNSET

    def as_error(self) -> HutchError:
        """Return the error with its reason; an unknown word falls back to the reason of the code."""
        try:
            details = msgspec.json.decode(self.data, type=dict[str, Any]) if self.data is not UNSET else {}
        except msgspec.DecodeError:
            details = {}
        word = details.pop("reason", None)
        error = HutchError(_BY_WORD.get(word) or _BY_CODE.get(self.code, Reason.INTERNAL), self.message)
        error.details = details
        return error


@dataclass(frozen=True, slots=True)
class Request:
    """A call that expects an answer. `params` is one JSON object or array, or None."""

    id: Id
    method: str
    params: Raw | None


@dataclass(frozen=True, slots=True)
class Notification:
    """A call that is never answered."""

    method: str
    params: Raw | None


@dataclass(frozen=True, slots=True)
class Response:
    """An answer: either `result` or `error` is set. `id` is None when the peer could not read the id of the call."""

    id: Id | None
    result: Raw | None
    error: WireError | None


@dataclass(frozen=True, slots=True)
class EnvelopeFault:
    """A frame or a batch member that is not a message. `id` UNSET: it must not be answered."""

    reason: Reason
    message: str
    id: Id | UnsetType | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """1 to 50 independent messages in one frame."""

    members: tuple[Request | Notification | Response | EnvelopeFault, ...]


_NOT_JSON: Final = EnvelopeFault(Reason.PARSE_ERROR, Reason.PARSE_ERROR.sentence)
_NOT_UTF8: Final = EnvelopeFault(Reason.PARSE_ERROR, "The message is not UTF-8.")
_TOO_DEEP: Final = EnvelopeFault(Reason.INVALID_REQUEST, f"The message is nested deeper than {DEPTH_LIMIT} levels.")
_TOO_LARGE_A_NUMBER: Final = EnvelopeFault(
    Reason.INVALID_REQUEST, f"A number has more than {DIGITS_LIMIT} digits or would be infinite."
)

Message = Request | Notification | Response | Batch | EnvelopeFault


class _Typed(msgspec.Struct, frozen=True):
    """The envelope of a usual frame."""

    jsonrpc: Literal["2.0"]
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    id: int | str | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Loose(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The envelope of any frame, with each member as its own bytes."""

    jsonrpc: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_decode_typed: Final = msgspec.json.Decoder(_Typed).decode
_decode_loose: Final = msgspec.json.Decoder(_Loose).decode
_decode_members: Final = msgspec.json.Decoder(list[Raw]).decode
_decode_id: Final = msgspec.json.Decoder(int | str).decode
_decode_text: Final = msgspec.json.Decoder(str).decode
_decode_any: Final = msgspec.json.Decoder().decode
_decode_raw: Final = msgspec.json.Decoder(Raw).decode
_decode_error: Final = msgspec.json.Decoder(WireError).decode
_encode: Final = msgspec.json.Encoder().encode


# ---------------------------------------------------------------- reading


def parse(frame: bytes) -> Message:
    """Return the message or fault in `frame`, one line without its `\\n`. Nothing that the peer writes raises."""
    wrong = text_fault(frame)
    if wrong is not None and wrong.reason is Reason.PARSE_ERROR:
        return wrong
    try:
        if not frame.lstrip(_BLANKS).startswith(b"["):
            return _with_text_fault(wrong, _read_envelope(frame))
        members = _decode_members(frame)
    except RecursionError:
        return _TOO_DEEP
    except msgspec.DecodeError:
        return _NOT_JSON
    if wrong is not None:
        return wrong
    if not members:
        return EnvelopeFault(Reason.INVALID_REQUEST, "A batch holds at least one message.")
    if len(members) > BATCH_LIMIT:
        return EnvelopeFault(Reason.INVALID_REQUEST, f"A batch holds at most {BATCH_LIMIT} messages.")
    return Batch(tuple(_read_envelope(bytes(member)) for member in members))


def text_fault(frame: bytes) -> EnvelopeFault | None:
    """Return the fault of the text (UTF-8, depth, numbers), or None. The decoder checks the grammar."""
    return _decode_and_check(frame) if len(frame) <= _USUAL else _scan(frame)


def is_sound(value: bytes) -> bool:
    """Tell whether the bytes are one JSON value that passes every check of a payload."""
    if text_fault(value) is not None:
        return False
    if len(value) > _USUAL:
        try:
            _decode_raw(value)
        except (msgspec.DecodeError, RecursionError):
            return False
    return True


def _decode_and_check(frame: bytes) -> EnvelopeFault | None:
    try:
        value = _decode_any(frame)
    except UnicodeDecodeError:
        return _NOT_UTF8
    except RecursionError:
        return _TOO_DEEP
    except msgspec.ValidationError:
        return _TOO_LARGE_A_NUMBER
    except msgspec.DecodeError:
        return _NOT_JSON
    if _is_harmless(frame):
        return None
    return _find_fault(value, DEPTH_LIMIT)


def _is_harmless(frame: bytes) -> bool:
    """Cheaply rule out excess depth and large numbers; False means that neither is ruled out."""
    brackets = frame.count(b"[") + frame.count(b"{")
    return brackets <= DEPTH_LIMIT and (
        len(frame) <= DIGITS_LIMIT or _TOO_MANY_DIGITS not in frame.translate(_AS_ZEROS)
    )


def _find_fault(value: Any, levels: int) -> EnvelopeFault | None:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return _find_fault([value], levels + 1)
    if not levels:
        return _TOO_DEEP
    for part in value:
        kind = type(part)
        if kind is dict or kind is list:
            if (fault := _find_fault(part, levels - 1)) is not None:
                return fault
        elif kind is int and not -_LARGEST <= part <= _LARGEST:
            return _TOO_LARGE_A_NUMBER
    return None


def _scan(frame: bytes) -> EnvelopeFault | None:
    if not frame.isascii() and not _is_utf8(frame):
        return _NOT_UTF8
    skeleton = _skeleton(frame)
    brackets = skeleton.translate(_AS_SQUARE, _NOT_BRACKETS)
    for _ in range(DEPTH_LIMIT):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            break
    else:
        return _TOO_DEEP
    zeros = skeleton.translate(_AS_ZEROS, b"+-")
    if _TOO_MANY_DIGITS in zeros:
        return _TOO_LARGE_A_NUMBER
    if any(sign in zeros for sign in _MAYBE_INFINITE) and any(map(_is_infinite, _FLOAT.findall(skeleton))):
        return _TOO_LARGE_A_NUMBER
    return None


def has_duplicate_keys(params: Raw | bytes) -> bool:
    """Tell whether an object in `params` (valid JSON) has a duplicate key. ValueError if it cannot be decoded."""
    members = _skeleton(bytes(params)).count(b":")
    return members > 1 and _skeleton(_encode(_decode_any(params))).count(b":") != members


def _is_utf8(whole: bytes) -> bool:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(whole), _SLICE):
            decode(whole[start : start + _SLICE])
        decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _skeleton(text: bytes) -> bytes:
    """Return `text` without its strings. Works in slices, so that a frame of only quotes needs little memory."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = []
    inside = 0
    for start in range(0, len(text), _SLICE):
        pieces = text[start : start + _SLICE].split(b'"')
        kept.append(b"".join(pieces[inside::2]))
        inside = (inside + len(pieces) - 1) & 1
    return kept[0] if len(kept) == 1 else b"".join(kept)


def _is_infinite(number: bytes) -> bool:
    return len(number) > 4 and not number.isdigit() and math.isinf(float(number))


def _with_text_fault(
    wrong: EnvelopeFault | None, message: Request | Notification | Response | EnvelopeFault
) -> Message:
    """Return the message, or the fault of its text with the id of the message."""
    match message:
        case _ if wrong is None:
            return message
        case Request(id=number):
            return EnvelopeFault(wrong.reason, wrong.message, number)
        case Notification() | Response():
            return EnvelopeFault(wrong.reason, wrong.message, UNSET)
        case EnvelopeFault():
            return message


def _read_envelope(frame: bytes) -> Request | Notification | Response | EnvelopeFault:
    """Read one envelope. DecodeError for wrong grammar, RecursionError for extreme depth."""
    try:
        seen = _decode_typed(frame)
    except msgspec.ValidationError:
        return _slow_path(frame)
    shortest = 17  # {"jsonrpc":"2.0"}
    if seen.method is not UNSET:
        shortest += 12 + len(seen.method)
    if seen.params is not UNSET:
        shortest += 10 + len(seen.params)
    if isinstance(seen.id, int):
        shortest += 6 + len(str(seen.id)) if -ID_LIMIT <= seen.id <= ID_LIMIT else 0
    elif seen.id is not UNSET:
        shortest += 8 + len(seen.id)
    if seen.result is not UNSET:
        shortest += 10 + len(seen.result)
    if seen.error is not UNSET:
        shortest += 9 + len(seen.error)
    if shortest != len(frame):
        return _slow_path(frame)
    return _classify(seen.method, seen.params, seen.id, seen.result, seen.error)


def _slow_path(frame: bytes) -> Request | Notification | Response | EnvelopeFault:
    """Read an envelope that does not have the shortest spelling, or return its fault."""
    try:
        seen = _decode_loose(frame)
    except msgspec.ValidationError:
        return EnvelopeFault(
            Reason.INVALID_REQUEST, "A message is an object with the members of JSON-RPC 2.0 and no others."
        )
    members = {name: bytes(raw) for name in seen.__struct_fields__ if (raw := getattr(seen, name)) is not UNSET}
    written = sum(len(name) + 4 + len(raw.translate(None, _BLANKS)) for name, raw in members.items()) + 1
    if written != len(frame.translate(None, _BLANKS)) and members:
        return EnvelopeFault(Reason.INVALID_REQUEST, "A member occurs twice, or its name is written with escapes.")
    is_answer = "method" not in members and ("result" in members or "error" in members)
    number: Id | UnsetType | None = UNSET
    wrong: str | None = None
    if "id" in members:
        try:
            number = _decode_id(members["id"])
        except (msgspec.DecodeError, UnicodeDecodeError):
            number = None
            if members["id"] != b"null" or not is_answer:
                wrong = "An id is a string or an integer."
        if isinstance(number, int) and not -ID_LIMIT <= number <= ID_LIMIT:
            number, wrong = None, "An integer id lies within ±2^53."
    if members.get("jsonrpc") != b'"2.0"':
        wrong = 'A message says "jsonrpc": "2.0".'
    method: str | UnsetType = UNSET
    if "method" in members:
        try:
            method = _decode_text(members["method"])
        except (msgspec.DecodeError, UnicodeDecodeError):
            wrong = "A method is named by a string."
    if wrong is not None:
        return EnvelopeFault(Reason.INVALID_REQUEST, wrong, UNSET if is_answer else None if number is UNSET else number)
    return _classify(method, seen.params, number, seen.result, seen.error)


def _classify(
    method: str | UnsetType,
    params: Raw | UnsetType,
    number: Id | UnsetType | None,
    result: Raw | UnsetType,
    error: Raw | UnsetType,
) -> Request | Notification | Response | EnvelopeFault:
    """Return the message that has these members, each valid by itself, or its fault."""
    answers = (result is not UNSET) + (error is not UNSET)
    if method is not UNSET and not answers:
        given = None if params is UNSET else params
        if given is not None and bytes(given)[:1] not in (b"{", b"["):
            return EnvelopeFault(
                Reason.INVALID_REQUEST, "Parameters are an object or an array.", None if number is UNSET else number
            )
        if number is UNSET:
            return Notification(method, given)
        assert number is not None
        return Request(number, method, given)
    if method is UNSET and answers == 1 and params is UNSET and number is not UNSET:
        if error is UNSET:
            return Response(number, result, None)  # type: ignore[arg-type]  # `error` is unset, so `result` is set
        try:
            return Response(number, None, _decode_error(error))
        except msgspec.ValidationError:
            return EnvelopeFault(Reason.INVALID_REQUEST, "The error of a response has a code and a message.", UNSET)
    if answers and method is UNSET:
        return EnvelopeFault(Reason.INVALID_REQUEST, "A response has an id and either a result or an error.", UNSET)
    return EnvelopeFault(Reason.INVALID_REQUEST, Reason.INVALID_REQUEST.sentence, None if number is UNSET else number)


# ---------------------------------------------------------------- writing


def encode_request(number: Id, method: str, params: msgspec.Struct | Raw | None) -> bytes:
    """Return the frame with its `\\n`; omit params that are None or an empty object."""
    return end_line(b'{"jsonrpc":"2.0","method":"%b"%b,"id":%b}' % (method.encode(), _params(params), _encode(number)))


def encode_notification(method: str, params: msgspec.Struct | Raw | None) -> bytes:
    """Return the frame with its `\\n`."""
    return end_line(b'{"jsonrpc":"2.0","method":"%b"%b}' % (method.encode(), _params(params)))


def encode_result(number: Id, result: Any) -> bytes:
    """Return the response without `\\n`, so that a batch can hold it. TypeError when `result` has no JSON form."""
    return b'{"jsonrpc":"2.0","result":%b,"id":%b}' % (_encode_valid(result), _encode(number))


def encode_error(number: Id | None, error: HutchError) -> bytes:
    """Return the error response without `\\n`. `error.details` must be plain JSON values."""
    body = {
        "code": error.reason.code,
        "message": error.message,
        "data": {**error.details, "reason": error.reason.word},
    }
    return b'{"jsonrpc":"2.0","error":%b,"id":%b}' % (_encode_valid(body), _encode(number))


def _params(params: msgspec.Struct | Raw | None) -> bytes:
    if params is None or (text := _encode(params)) == b"{}":
        return b""
    return b',"params":' + text


def _encode_valid(value: Any) -> bytes:
    """Encode an answer. Invalid text in it becomes U+FFFD: one name of a file must not cost an answer.

    A request is not changed like this, since the other side would act on another path than the one that was meant.
    """
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(valid_value(msgspec.to_builtins(value)))


def end_line(frame: bytes) -> bytes:
    """Append the `\\n`. Line breaks between the tokens of a payload are removed."""
    if b"\n" in frame:
        frame = msgspec.json.format(frame, indent=-1)
    return frame + b"\n"
