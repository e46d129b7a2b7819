"""From the bytes of one frame to a typed message, and back.

Theory. Decoding a payload twice is what a relay cannot afford, and trusting a decoder is what a border cannot afford.
So the payload (params, result) is only skipped over by the decoder, which checks its grammar; what that does not check
is checked here by a few passes that run at memory speed:

- UTF-8, depth and numbers that readers choke on (integers over 400 digits, floats that would be infinite): a frame of
  usual size is decoded once and thrown away, which is the fastest check there is. A large one could blow up in memory
  to twenty times its size, so it is only looked over: UTF-8 in slices, the rest in its *skeleton*, which is what is
  left when all strings are cut out. There each pass takes off the innermost pairs of brackets, so that what is left
  after DEPTH_LIMIT passes was too deep, and numbers are found by substring.
- Duplicate members of the envelope: a frame that is exactly as long as its members written in the shortest way holds
  nothing besides them. That is one comparison. A frame written with blanks or in another way goes the long way, where
  the same sum is made over the members' own bytes without blanks.
- Duplicate keys in parameters: the skeleton has one colon for each member, before and after they were folded into
  dicts; the two counts differ when one was folded away.

Always true: a message given out has passed all of these; a `Fault` says which one failed, and whether it may be
answered at all.
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

__all__ = [
    "BATCH_LIMIT",
    "DEPTH_LIMIT",
    "DIGITS_LIMIT",
    "ID_LIMIT",
    "Batch",
    "Fault",
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
        """Return the error with its reason; a word that is not known here is told by the code."""
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
    """A call that waits for an answer. `params` is one JSON object or array, or None when there are none."""

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
    """An answer; `id` is None when the other side could not tell which call it was. Exactly one of the two is set."""

    id: Id | None
    result: Raw | None
    error: WireError | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A frame or a batch member that is no message. `id` UNSET: it must not be answered."""

    reason: Reason
    message: str
    id: Id | UnsetType | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """1 to 50 messages in one frame; each stands for itself."""

    members: tuple[Request | Notification | Response | Fault, ...]


_NOT_JSON: Final = Fault(Reason.PARSE_ERROR, Reason.PARSE_ERROR.sentence)
_NOT_UTF8: Final = Fault(Reason.PARSE_ERROR, "The message is not UTF-8.")
_TOO_DEEP: Final = Fault(Reason.INVALID_REQUEST, f"The message is nested deeper than {DEPTH_LIMIT} levels.")
_TOO_LARGE_A_NUMBER: Final = Fault(
    Reason.INVALID_REQUEST, f"A number has more than {DIGITS_LIMIT} digits or would be infinite."
)

Message = Request | Notification | Response | Batch | Fault


class _Typed(msgspec.Struct, frozen=True):
    """The envelope as most frames have it."""

    jsonrpc: Literal["2.0"]
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    id: int | str | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Loose(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The envelope of any frame: its members' own bytes."""

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
    """Return what `frame` (one line without its end) says; never raises for what the other side wrote."""
    wrong = text_fault(frame)
    if wrong is not None and wrong.reason is Reason.PARSE_ERROR:
        return wrong
    try:
        if not frame.lstrip(_BLANKS).startswith(b"["):
            return _with(wrong, _one(frame))
        members = _decode_members(frame)
    except RecursionError:
        return _TOO_DEEP
    except msgspec.DecodeError:
        return _NOT_JSON
    if wrong is not None:
        return wrong
    if not members:
        return Fault(Reason.INVALID_REQUEST, "A batch holds at least one message.")
    if len(members) > BATCH_LIMIT:
        return Fault(Reason.INVALID_REQUEST, f"A batch holds at most {BATCH_LIMIT} messages.")
    return Batch(tuple(_one(bytes(member)) for member in members))


def text_fault(frame: bytes) -> Fault | None:
    """Return what is wrong with the text as such: UTF-8, depth, numbers. The grammar is left to the decoder."""
    return _tried(frame) if len(frame) <= _USUAL else _looked_over(frame)


def is_sound(value: bytes) -> bool:
    """Tell whether the bytes are one JSON value that passes all that is asked of a payload."""
    if text_fault(value) is not None:
        return False
    if len(value) > _USUAL:
        try:
            _decode_raw(value)
        except (msgspec.DecodeError, RecursionError):
            return False
    return True


def _tried(frame: bytes) -> Fault | None:
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
    return _fault_in(value, DEPTH_LIMIT)


def _is_harmless(frame: bytes) -> bool:
    """Tell of most small frames, at a glance, that they can be neither too deep nor hold too large a number."""
    brackets = frame.count(b"[") + frame.count(b"{")
    return brackets <= DEPTH_LIMIT and (
        len(frame) <= DIGITS_LIMIT or _TOO_MANY_DIGITS not in frame.translate(_AS_ZEROS)
    )


def _fault_in(value: Any, levels: int) -> Fault | None:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return _fault_in([value], levels + 1)
    if not levels:
        return _TOO_DEEP
    for part in value:
        kind = type(part)
        if kind is dict or kind is list:
            if (fault := _fault_in(part, levels - 1)) is not None:
                return fault
        elif kind is int and not -_LARGEST <= part <= _LARGEST:
            return _TOO_LARGE_A_NUMBER
    return None


def _looked_over(frame: bytes) -> Fault | None:
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
    """Tell whether any object in `params` (grammatical JSON) has a key twice. ValueError on what cannot be decoded."""
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
    """Return `text` without its strings. In slices, so that a frame of quotes alone does not fill the memory."""
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


def _with(wrong: Fault | None, message: Request | Notification | Response | Fault) -> Message:
    """Give the fault of the text the id of the message that it is about."""
    match message:
        case _ if wrong is None:
            return message
        case Request(id=number):
            return Fault(wrong.reason, wrong.message, number)
        case Notification() | Response():
            return Fault(wrong.reason, wrong.message, UNSET)
        case Fault():
            return message


def _one(frame: bytes) -> Request | Notification | Response | Fault:
    """Read one envelope. Raises DecodeError where the grammar is wrong, RecursionError where it is far too deep."""
    try:
        seen = _decode_typed(frame)
    except msgspec.ValidationError:
        return _long_way(frame)
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
        return _long_way(frame)
    return _sort(seen.method, seen.params, seen.id, seen.result, seen.error)


def _long_way(frame: bytes) -> Request | Notification | Response | Fault:
    """Read an envelope that is not written in the shortest way, or find what is wrong with it."""
    try:
        seen = _decode_loose(frame)
    except msgspec.ValidationError:
        return Fault(Reason.INVALID_REQUEST, "A message is an object with the members of JSON-RPC 2.0 and no others.")
    members = {name: bytes(raw) for name in seen.__struct_fields__ if (raw := getattr(seen, name)) is not UNSET}
    written = sum(len(name) + 4 + len(raw.translate(None, _BLANKS)) for name, raw in members.items()) + 1
    if written != len(frame.translate(None, _BLANKS)) and members:
        return Fault(Reason.INVALID_REQUEST, "A member is there twice, or its name is written with escapes.")
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
        return Fault(Reason.INVALID_REQUEST, wrong, UNSET if is_answer else None if number is UNSET else number)
    return _sort(method, seen.params, number, seen.result, seen.error)


def _sort(
    method: str | UnsetType,
    params: Raw | UnsetType,
    number: Id | UnsetType | None,
    result: Raw | UnsetType,
    error: Raw | UnsetType,
) -> Request | Notification | Response | Fault:
    """Tell what kind of message has these members; each is sound by itself."""
    answers = (result is not UNSET) + (error is not UNSET)
    if method is not UNSET and not answers:
        given = None if params is UNSET else params
        if given is not None and bytes(given)[:1] not in (b"{", b"["):
            return Fault(
                Reason.INVALID_REQUEST, "Parameters are an object or an array.", None if number is UNSET else number
            )
        if number is UNSET:
            return Notification(method, given)
        assert number is not None
        return Request(number, method, given)
    if method is UNSET and answers == 1 and params is UNSET and number is not UNSET:
        if error is UNSET:
            return Response(number, result, None)  # type: ignore[arg-type]  # one of the two is there
        try:
            return Response(number, None, _decode_error(error))
        except msgspec.ValidationError:
            return Fault(Reason.INVALID_REQUEST, "The error of a response has a code and a message.", UNSET)
    if answers and method is UNSET:
        return Fault(Reason.INVALID_REQUEST, "A response has an id and either a result or an error.", UNSET)
    return Fault(Reason.INVALID_REQUEST, Reason.INVALID_REQUEST.sentence, None if number is UNSET else number)


# ---------------------------------------------------------------- writing


def encode_request(number: Id, method: str, params: msgspec.Struct | Raw | None) -> bytes:
    """Return the frame with its `\\n`; None and an object without members are left out."""
    return end_line(b'{"jsonrpc":"2.0","method":"%b"%b,"id":%b}' % (method.encode(), _params(params), _encode(number)))


def encode_notification(method: str, params: msgspec.Struct | Raw | None) -> bytes:
    """Return the frame with its `\\n`."""
    return end_line(b'{"jsonrpc":"2.0","method":"%b"%b}' % (method.encode(), _params(params)))


def encode_result(number: Id, result: Any) -> bytes:
    """Return the response without a `\\n`, since it may go into a batch. TypeError when `result` has no JSON form."""
    return b'{"jsonrpc":"2.0","result":%b,"id":%b}' % (_encode(result), _encode(number))


def encode_error(number: Id | None, error: HutchError) -> bytes:
    """Return the error response without a `\\n`. `error.details` must be plain JSON values."""
    body = {
        "code": error.reason.code,
        "message": error.message,
        "data": {**error.details, "reason": error.reason.word},
    }
    return b'{"jsonrpc":"2.0","error":%b,"id":%b}' % (_encode(body), _encode(number))


def _params(params: msgspec.Struct | Raw | None) -> bytes:
    if params is None or (text := _encode(params)) == b"{}":
        return b""
    return b',"params":' + text


def end_line(frame: bytes) -> bytes:
    """End the frame. A payload that came with line breaks between its tokens loses them here."""
    if b"\n" in frame:
        frame = msgspec.json.format(frame, indent=-1)
    return frame + b"\n"
