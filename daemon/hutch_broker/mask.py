"""Removes the key from a provider's answer before the agent gets it: from headers and from bodies of any type. Pure.

What is always true:

- No byte is released before it was searched for the key in all its forms (`hutch_shared.secret_forms`).
- A whole form is replaced with stars of its length, so `Content-Length` and the rest of the answer stay valid. What
  cannot be masked is `key_in_answer`: the answer is refused, or cut if its head was sent.
- Forms are found across seams. Of a plain body, the bytes that may begin a form are held until more come. Of a stream,
  the texts of its events are joined. An event is held while a text ends with a part of a form: without limit after 16
  characters, for some events after 6, if it is a text that arrives in pieces. A form that the next events complete
  cuts the stream. Shorter parts occur by chance and hold nothing; what is left of such a form is still noticed.
- Compressed bodies are decompressed, within bounds. What cannot be inspected is refused.
"""

from __future__ import annotations

import binascii
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from hutch_shared.secret_forms import SecretForms
from hutch_shared.text import read_lax_json

__all__ = ["WITHHELD", "AnswerMask", "WithheldError", "checked_status", "clean_headers"]

Header = tuple[str, str]

_HELD: Final = 1 << 20
"""The most bytes that are held because they may be a part of the key."""
_EVENT: Final = 8 << 20
"""The largest event of a stream, in bytes."""
_DOCUMENT: Final = 4 << 20
"""The largest JSON document, in bytes, whose texts are joined. A larger one is searched while it streams."""
_INFLATED: Final = 64 << 20
"""The most bytes that a compressed body may have once decompressed."""
_PLACES: Final = 4096
"""The most places in its events in which a stream may have texts."""
_CERTAIN: Final = 16
"""The number of characters of a form that do not occur by chance: events are held without limit after them."""
_PATIENCE: Final = 4
"""The number of events that are held after fewer characters, such as a word that is in the key."""
_TAIL: Final = 128
"""How many bytes at the end of a text are remembered."""
_LEADING: Final = 16
"""How many bytes before a possible form are held with it: blanks, or the begin of an escape."""
_CHARSETS: Final = frozenset(("", "utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "utf-16", "utf-16le"))
_SHAPES: Final = 64
"""How many times the shape of a stream's events is learnt. A stream whose shapes never recur gains nothing by it."""
_STRING: Final = re.compile(rb'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*')
"""What stands between the quotes of a string in JSON."""
_STREAM_FIELDS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r){2}")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


WITHHELD: Final = ("key_in_answer", "answer_not_inspected")
"""The kinds of `WithheldError`."""


class WithheldError(Exception):
    """The answer must not reach the agent. `kind` is one of `WITHHELD`, `why` a sentence."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


def _key_found() -> WithheldError:
    return WithheldError("key_in_answer", "The provider's answer contained the key, and it cannot be masked there.")


def _not_inspected(why: str) -> WithheldError:
    return WithheldError("answer_not_inspected", f"The provider's answer cannot be inspected: {why}.")


def clean_headers(forms: SecretForms, headers: Iterable[Header]) -> list[Header]:
    """Return the headers of an answer with the key masked in their values, without those whose name contains it.

    WithheldError if several headers contain the key together.
    """
    kept = []
    for name, value in headers:
        if forms.found(name.encode("utf-8", "surrogateescape")):
            continue
        raw = value.encode("utf-8", "surrogateescape")
        if forms.found(raw):
            raw, _ = forms.mask(raw)
            if forms.found(raw):
                continue
        kept.append((name, raw.decode("utf-8", "surrogateescape")))
    for together in ("".join(name for name, _ in kept), "".join(value for _, value in kept)):
        if forms.found(together.encode("utf-8", "surrogateescape")):
            raise _key_found()
    return kept


def checked_status(status: int) -> int:
    """Return the status of an answer; its words are not passed on. WithheldError if HTTP does not end with it."""
    if not 200 <= status <= 599:
        raise _not_inspected("its status is not one of an answer")
    return status


class _MaskedBody(Protocol):
    """Releases the bytes of one kind of body as soon as they are known to be harmless. Both may raise WithheldError."""

    def feed(self, chunk: bytes) -> bytes: ...
    def end(self) -> bytes: ...


class AnswerMask:
    """Hides the key in the body of one answer."""

    def __init__(self, forms: SecretForms, content_type: str, encoding: str, transfer: str) -> None:
        """Prepare for a body with these headers (`Content-Type` and so on). WithheldError if it cannot be inspected."""
        if transfer.strip().lower() not in ("", "chunked"):
            raise _not_inspected("it is transferred in a way that Hutch does not read")
        kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
        charset = next((one.partition("=")[2].strip("\"' ") for one in parameters if one.startswith("charset=")), "")
        if charset not in _CHARSETS:
            raise _not_inspected("it has an unusual character set")
        self._forms = forms
        self._kind = kind
        self._inflater = _inflater(encoding)
        self._begin = b""
        self._body: _MaskedBody | None = None
        if kind == "application/vnd.amazon.eventstream":
            self._body = _Frames(forms)

    @property
    def decompresses(self) -> bool:
        """True if the released bytes have another length than the provider's, and no encoding."""
        return self._inflater is not None

    @property
    def is_document(self) -> bool:
        """True if nothing is released before the end, so that the head need not be sent before."""
        return self._kind == "application/json"

    def inflate(self, chunk: bytes) -> bytes:
        """Return the provider's next bytes decompressed, for `feed`. WithheldError: nothing more may be sent."""
        return chunk if self._inflater is None else self._inflater.feed(chunk)

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be sent now. WithheldError: nothing more may be sent."""
        if self._body is not None:
            return self._body.feed(chunk)
        self._begin += chunk
        begin = self._begin.lstrip(b"\xef\xbb\xbf \t\r\n")
        if len(begin) < len(b"event:") and len(self._begin) < _LEADING:
            return b""
        return self._begun(begin)

    def end(self) -> bytes:
        """Return the bytes that were held. Call it when the body is complete. WithheldError as for `feed`."""
        if self._inflater is not None:
            self._inflater.end()
        released = b"" if self._body is not None else self._begun(self._begin.lstrip(b"\xef\xbb\xbf \t\r\n"))
        assert self._body is not None
        return released + self._body.end()

    def _begun(self, begin: bytes) -> bytes:
        """Choose how to search a body that begins like this; release what is harmless. Clients ignore wrong types."""
        if begin.startswith((b"{", b"[")):
            self._body = _Document(self._forms)
        elif self._kind == "text/event-stream" or begin.startswith(_STREAM_FIELDS):
            self._body = _Events(self._forms)
        elif self.is_document:
            self._body = _Document(self._forms)
        else:
            self._body = _Plain(self._forms)
        begun, self._begin = self._begin, b""
        return self._body.feed(begun)


def _masked(forms: SecretForms, text: bytes) -> bytes:
    """Return `text` with the key masked. WithheldError if a part of it remains."""
    if not forms.found(text):
        return text
    masked, _ = forms.mask(text)
    if forms.found(masked):
        raise _key_found()
    return masked


class _Plain:
    """Any text or bytes. Holds the last bytes while they may be a part of a form that goes on."""

    def __init__(self, forms: SecretForms) -> None:
        self._forms = forms
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        window = _masked(self._forms, self._held + chunk)
        length = self._forms.overlap(self._forms.reduced(window[-_HELD:]), 1)
        start = self._forms.start_of_last(window, length)
        if start < len(window):
            first = max(0, start - _LEADING)
            while start > first and not self._forms.reduced(window[start - 1 : start]):
                start -= 1
        self._held = window[start:]
        if len(self._held) >= _HELD:
            raise _not_inspected("it goes on like the key for too long")
        return window[:start]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


class _Document:
    """A JSON document: held until its end, since the agent reads its texts together."""

    def __init__(self, forms: SecretForms) -> None:
        self._forms = forms
        self._pieces: list[bytes] = []
        self._size = 0
        self._large: _Plain | None = None

    def feed(self, chunk: bytes) -> bytes:
        if self._large is not None:
            return self._large.feed(chunk)
        self._pieces.append(chunk)
        self._size += len(chunk)
        if self._size <= _DOCUMENT:
            return b""
        self._large = _Plain(self._forms)
        return self._large.feed(b"".join(self._pieces))

    def end(self) -> bytes:
        if self._large is not None:
            return self._large.end()
        text = _masked(self._forms, b"".join(self._pieces))
        joined: dict[str, list[str]] = {}
        for path, one in _texts_of(text):
            joined.setdefault(path, []).append(one)
        for texts in joined.values():
            if len(texts) > 1 and self._forms.found(_bytes("".join(texts))):
                raise _key_found()
        return text


class _Texts:
    """Joins the texts of a stream's events, by their place in the event. Finds a form that several events complete."""

    def __init__(self, forms: SecretForms) -> None:
        self._forms = forms
        self._tails: dict[str, bytes] = {}
        """The last bytes of each text."""
        self._last: dict[str, bytes] = {}
        """The latest pieces that end unlike a form: the same piece again ends in the same way."""
        self._open: dict[str, bytes] = {}
        """The texts that end with a part of a form, from before this part on."""
        self._waits: dict[str, int] = {}
        """For how many more events each of these texts is waited for."""

    def feed(self, path: str, text: bytes) -> None:
        """Add the next text. WithheldError if it completes a form, or goes on like one for too long."""
        if self._last.get(path) == text:
            return
        before = self._tails.get(path)
        if before is None and len(self._tails) >= _PLACES:
            raise _not_inspected("its events have texts in too many places")
        if path not in self._open:
            if self._forms.ends_otherwise(text):
                self._last[path] = text
                self._tails[path] = text[-_TAIL:]
                return
            if before is not None and self._forms.ends_otherwise(joined := before + text):
                self._last.pop(path, None)
                self._tails[path] = joined[-_TAIL:]
                return
        self._last.pop(path, None)
        begun = self._open.pop(path, None)
        joined = (before or b"" if begun is None else begun) + text
        if begun is not None:
            if self._forms.found(joined):
                raise _key_found()
            if len(joined) > _HELD:
                raise _not_inspected("it goes on like the key for too long")
        length = self._forms.goes_on(joined)
        self._waits.pop(path, None)
        if length:
            self._open[path] = joined
            if length >= _CERTAIN:
                self._waits[path] = _HELD
            elif before is not None:
                self._waits[path] = _PATIENCE
        self._tails[path] = joined[-_TAIL:]

    def repeats(self, texts: Iterable[tuple[str, bytes]]) -> bool:
        """Return whether `feed` would do nothing with these texts."""
        return all(self._last.get(path) == text for path, text in texts)

    def must_wait(self) -> bool:
        """Return whether an event must be held for the texts of the next one. Call it once for each event."""
        if self._waits:
            self._waits = {path: events - 1 for path, events in self._waits.items() if events}
        return bool(self._waits)


class _Held:
    """Holds events while a text of theirs may be a part of a form that the next events complete."""

    def __init__(self, forms: SecretForms) -> None:
        self.texts = _Texts(forms)
        self._events: list[bytes] = []
        self._size = 0

    def pass_on(self, event: bytes, texts: Iterable[tuple[str, bytes]]) -> bytes:
        """Return the events that can be sent now."""
        for path, text in texts:
            self.texts.feed(path, text)
        if not self.texts.must_wait():
            return self.end() + event if self._events else event
        self._events.append(event)
        self._size += len(event)
        if self._size > _HELD:
            raise _not_inspected("it goes on like the key for too long")
        return b""

    def end(self) -> bytes:
        """Return the events that were held."""
        events, self._events, self._size = self._events, [], 0
        return b"".join(events)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Events that differ in one text of their JSON data alone, as most events of a stream do."""

    before: bytes
    """The event up to the text, its quote included."""
    after: bytes
    path: str
    others: tuple[tuple[str, bytes], ...]
    """The other texts of the event."""

    @classmethod
    def of(cls, event: bytes, texts: list[tuple[str, bytes]]) -> _Shape | None:
        """Return the shape of an event whose texts these are, with the last one open; None if it cannot be told."""
        *others, (path, text) = texts
        at = event.rfind(b'"%b"' % text) + 1
        if not at or path in dict(others):
            return None
        shape = cls(event[:at], event[at + len(text) :], path, tuple(others))
        changed = list(_fields_of(b"%bprobe%b" % (shape.before, shape.after)))
        return shape if changed == [*others, (path, b"probe")] else None

    def text_in(self, event: bytes) -> bytes | None:
        """Return the text of an event of this shape; None for other events."""
        if not event.startswith(self.before) or not event.endswith(self.after):
            return None
        text = event[len(self.before) : -len(self.after)]
        if not _STRING.fullmatch(text) or len(event) < len(self.before) + len(self.after):
            return None
        if b"\\" not in text:
            return text
        try:
            return _bytes(msgspec.json.decode(b'"%b"' % text, type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class _Events:
    """Server-sent events, released whole."""

    def __init__(self, forms: SecretForms) -> None:
        self._forms = forms
        self._held = _Held(forms)
        self._begun = bytearray()
        """The begin of an event, without its end."""
        self._shape: _Shape | None = None
        """The shape of the latest event, so that the next one need not be decoded."""
        self._shapes = 0

    def feed(self, chunk: bytes) -> bytes:
        before = len(self._begun)
        self._begun += chunk
        end = _last_end(self._begun, max(0, before - 2))
        whole = bytes(self._begun[:end])
        del self._begun[:end]
        if len(self._begun) > _EVENT:
            raise _not_inspected("an event is too large")
        return self._released(whole)

    def end(self) -> bytes:
        return self._released(bytes(self._begun)) + self._held.end()

    def _released(self, block: bytes) -> bytes:
        block = _masked(self._forms, block)
        return b"".join([self._held.pass_on(event, self._texts_of(event)) for event in _split(block)])

    def _texts_of(self, event: bytes) -> Iterable[tuple[str, bytes]]:
        """Return the texts of an event, without those that repeat the latest event's."""
        shape = self._shape
        if shape is not None and (text := shape.text_in(event)) is not None and self._held.texts.repeats(shape.others):
            return ((shape.path, text),)
        texts = list(_fields_of(event))
        if texts and self._shapes < _SHAPES and (shape is None or shape.text_in(event) is None):
            self._shapes += 1
            self._shape = _Shape.of(event, texts)
        return texts


def _last_end(text: bytearray, start: int) -> int:
    """Return where the last whole event in `text` ends, whichever line ends it uses; 0 if no end is after `start`."""
    if text.endswith(b"\n\n"):
        return len(text)
    marks = (b"\n\n", b"\n\r\n", b"\n\r", b"\r\r")
    return max((at + len(mark) for mark in marks if (at := text.rfind(mark, start)) >= 0), default=0)


def _split(block: bytes) -> list[bytes]:
    """Split a block into events, each with its end."""
    if b"\r" not in block:
        if block.find(b"\n\n") == len(block) - 2:
            return [block]
        *events, rest = block.split(b"\n\n")
        return [event + b"\n\n" for event in events] + ([rest] if rest else [])
    events, start = [], 0
    for end in _EVENT_END.finditer(block):
        events.append(block[start : end.end()])
        start = end.end()
    return [*events, block[start:]] if start < len(block) else events


def _fields_of(event: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the texts of an event: each field of a line that is not data, and each text of the JSON data."""
    data = []
    event = event.removeprefix(b"\xef\xbb\xbf")
    for line in event.split(b"\n") if b"\r" not in event else _LINE_END.split(event):
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif line:
            name, _, value = line.partition(b":")
            yield (name.decode("latin-1"), value) if value else ("", line)
    if len(data) > 1:
        yield from (("data", line) for line in data)
    if data:
        for path, one in _texts_of(b"\n".join(data)):
            yield path, _bytes(one)


def _texts_of(document: bytes) -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON document with their places in it; the whole text if it is not JSON."""
    try:
        value = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = read_lax_json(document)
        except RecursionError:
            raise _not_inspected("it is nested too deeply") from None
        except ValueError:
            value = document.decode("latin-1")
    yield from _walked(value, "data")


def _walked(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str):
                yield f"{path}.{name}", inner
            elif isinstance(inner, dict | list):
                yield from _walked(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _walked(inner, path)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class _Frames:
    """Amazon's binary event stream. Frames have a checksum, so a frame with the key is not masked but withheld."""

    def __init__(self, forms: SecretForms) -> None:
        self._forms = forms
        self._held = _Held(forms)
        self._begun = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        self._begun += chunk
        released = []
        while len(self._begun) >= 12:
            length, head = (int.from_bytes(self._begun[at : at + 4], "big") for at in (0, 4))
            if not 16 + head <= length <= _EVENT:
                raise _not_inspected("a frame of the stream is malformed")
            if len(self._begun) < length:
                break
            frame = bytes(self._begun[:length])
            del self._begun[:length]
            released.append(self._held.pass_on(frame, self._texts(frame, frame[12 + head : -4])))
        return b"".join(released)

    def end(self) -> bytes:
        if self._begun:
            raise _not_inspected("a frame of the stream broke off")
        return self._held.end()

    def _texts(self, frame: bytes, payload: bytes) -> Iterator[tuple[str, bytes]]:
        if self._forms.found(frame):
            raise _key_found()
        for path, text in _texts_of(payload):
            inner = _bytes(text)
            if path == "data.bytes":
                try:
                    inner = binascii.a2b_base64(inner)
                except binascii.Error:
                    raise _not_inspected("a frame of the stream is malformed") from None
                if self._forms.found(inner):
                    raise _key_found()
                for place, one in _texts_of(inner):
                    yield place, _bytes(one)
            else:
                yield path, inner


class _Inflater:
    """Decompresses a body of bounded size. Every method may raise WithheldError."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._inflate: Any = None
        self._begin = b""
        self._left = _INFLATED

    def feed(self, chunk: bytes) -> bytes:
        if self._inflate is None:
            self._begin += chunk
            if len(self._begin) < 2:
                return b""
            chunk, self._begin = self._begin, b""
            bare = self._window == zlib.MAX_WBITS and (chunk[0] & 15 != 8 or int.from_bytes(chunk[:2], "big") % 31)
            self._inflate = zlib.decompressobj(-zlib.MAX_WBITS if bare else self._window)
        try:
            inflated: bytes = self._inflate.decompress(chunk, self._left + 1)
        except zlib.error:
            raise _not_inspected("it is compressed and damaged") from None
        self._left -= len(inflated)
        if self._left < 0:
            raise _not_inspected(f"it has more than {_INFLATED >> 20} MiB when it is decompressed")
        if self._inflate.unused_data:
            raise _not_inspected("something follows the compressed text")
        return inflated

    def end(self) -> None:
        """Check that the body is complete. An empty body is."""
        if self._begin or (self._inflate is not None and not self._inflate.eof):
            raise _not_inspected("it is compressed and damaged")


def _inflater(encoding: str) -> _Inflater | None:
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return _Inflater(zlib.MAX_WBITS | 16)
        case "deflate":
            return _Inflater(zlib.MAX_WBITS)
        case _:
            raise _not_inspected("it is compressed in a way that Hutch does not read")
