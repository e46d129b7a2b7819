"""Finds and masks a secret in the forms in which it leaks: unchanged, escaped, encoded, reversed or spelled out. Pure.

Theory. Text is compared in a reduced form: only ASCII letters and digits count, in lower case. So blanks, line ends,
punctuation, NULs of wide characters, padding and the case make no difference, and base64 looks like base64url. `forms`
lists the encodings; the search looks for the middle of each reduced form, without the prefix that all keys of a
provider share. So it finds every whole secret and most cut ones; what is left of the others is less than a half. Text
with escapes (JSON, percent, HTML) is decoded and searched again, so characters may be escaped in any mixture.

Speed. A text is first compared with a set of 8-byte blocks: a middle of 16 bytes contains one block that is aligned in
the text, wherever it begins. This takes about a microsecond for an event of a stream, for any number of forms.

A secret below 8 letters and digits is hardly one: only its exact text is searched.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Final
from urllib.parse import quote

__all__ = ["SecretForms", "forms", "may_contain"]

_COMMON: Final = 14
"""The length of the prefix that keys of a provider may share (`sk-ant-api03-`)."""
_SHORT: Final = 20
"""The number of characters after the prefix below which the prefix counts as part of the secret."""
_EXACT: Final = 8
"""The number of letters and digits below which only the exact text of a secret is searched."""
_MIDDLE: Final = 16
_BLOCK: Final = 8
_LAYERS: Final = 3
"""How many times escapes are decoded: an escape may be escaped again."""

_LOWER: Final = bytes(range(256)).lower()
_ALNUM: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum())
_OTHER: Final = bytes(byte for byte in range(256) if byte not in _ALNUM)

_ESCAPES: Final = re.compile(
    rb"\\(?<!\\\\)\\*+(?:u([0-9a-f]{4})|u\{([0-9a-f]{1,6})\}|x([0-9a-f]{2}))"
    rb"|%(?:25)*([0-9a-f]{2})|&#(?:([0-9]{1,7})|x([0-9a-f]{1,6}));?|&[a-z]{2,8};",
    re.IGNORECASE,
)
"""An escape. It begins at the first of several backslashes: from each of them, `re` would read the others again."""
_CONTROLS: Final = (rb"\\n", rb"\n", rb"\r", rb"\t")
"""The escapes of control characters that are left out: a line end in JSON inside JSON, then those in JSON."""
_NEAR: Final = 64
"""The number of bytes at the end of a text that 6 characters may take, escaped."""
_INCOMPLETE: Final = re.compile(
    rb"(?:\\(?<!\\\\)\\*+(?:u[0-9a-f]{0,3}|u\{[0-9a-f]{0,6}|x[0-9a-f]?)?"
    rb"|%[0-9a-f]{0,3}|&(?:#?x?[0-9a-f]{0,7}|[a-z]{0,8}))\Z",
    re.IGNORECASE,
)
"""An escape that the end of a text cuts."""
_CONTROL: Final = re.compile(rb"\\{1,2}n|\\[rt]")
_REGION: Final = 8192
"""The fewest bytes of a text in which a form is looked for to mask it."""
_EXPANDED: Final = 32
"""More bytes than a form takes for each byte of the secret, even if each of its characters is escaped."""
_GRAM: Final = 6
"""The number of characters with which `SecretForms.overlap` is fastest."""


def _reduced(text: bytes) -> bytes:
    """Return the ASCII letters and digits of `text`, in lower case."""
    return text.translate(_LOWER, _OTHER)


def _stars(hit: bytes) -> bytes:
    """Return stars of the length of `hit`, so that a length that was announced stays valid."""
    return b"*" * len(hit)


def _blocks_in(text: bytes) -> list[int]:
    """Return the aligned 8-byte blocks of a reduced text, as numbers, for a comparison with `SecretForms.blocks`."""
    return memoryview(text)[: len(text) & -_BLOCK].cast("Q").tolist()


def forms(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the forms of an ASCII secret with their names. Where context changes the ends, yield the inner part."""
    text = secret.decode()
    yield "plain", secret
    yield "reversed", secret[::-1]
    yield "rot13", codecs.encode(text, "rot13").encode()
    once = json.dumps(text)[1:-1]
    yield "JSON", once.encode()
    yield "JSON in JSON", json.dumps(once)[1:-1].encode()
    yield "JSON, each character escaped", _each(secret, "\\u{:04x}")
    for name, quoted in (("URL", quote(text, safe="")), ("URL without slashes", quote(text))):
        yield name, quoted.encode()
        yield f"{name}, twice", quoted.replace("%", "%25").encode()
    yield "URL, punctuation escaped", _punctuation(secret, "%{:02x}")
    yield "URL, each character escaped", _each(secret, "%{:02x}")
    yield "URL, each character escaped twice", _each(secret, "%25{:02x}")
    yield "URL, punctuation escaped twice", _punctuation(secret, "%25{:02x}")
    yield "escapes in braces", _each(secret, "\\u{{{:x}}}")
    yield "JSON, punctuation escaped", _punctuation(secret, "\\u{:04x}")
    yield "HTML", escape(text).encode()
    yield "HTML, each character as a decimal number", _each(secret, "&#{};")
    yield "HTML, each character as a hexadecimal number", _each(secret, "&#x{:x};")
    yield "HTML, punctuation escaped", _punctuation(secret, "&#{};")
    yield "HTML, punctuation escaped in hexadecimal", _punctuation(secret, "&#x{:x};")
    yield "hexadecimal", secret.hex().encode()
    yield "hexadecimal, reversed", secret.hex().encode()[::-1]
    yield "hexadecimal of the reversed", secret[::-1].hex().encode()
    yield "hexadecimal, each byte after 0x", _each(secret, "0x{:02x} ")
    yield "octal", _each(secret, "\\{:03o}")
    yield "binary", _each(secret, "{:08b} ")
    for name, source in (("", secret), (" of the reversed", secret[::-1]), (" of hexadecimal", secret.hex().encode())):
        for offset in range(3):
            yield f"base64{name}, {offset} after a group", _grouped(source, offset, 3, 4, base64.b64encode)
    for offset in range(3):
        inner = _grouped(secret, offset, 3, 4, base64.b64encode)
        yield f"base64 reversed, {offset} after a group", inner[::-1]
        yield f"hexadecimal of base64, {offset} after a group", inner.hex().encode()
        for outer in range(3):
            twice = _grouped(inner, outer, 3, 4, base64.b64encode)
            yield f"base64 of base64, {offset} and {outer} after a group", twice
    for offset in range(5):
        yield f"base32, {offset} after a group", _grouped(secret, offset, 5, 8, base64.b32encode)
        yield f"base32hex, {offset} after a group", _grouped(secret, offset, 5, 8, base64.b32hexencode)
    for offset in range(4):
        yield f"base85, {offset} after a group", _whole_groups(secret, offset, base64.b85encode)
        yield f"ascii85, {offset} after a group", _whole_groups(secret, offset, base64.a85encode)


def _each(secret: bytes, form: str) -> bytes:
    return "".join(form.format(byte) for byte in secret).encode()


def _punctuation(secret: bytes, form: str) -> bytes:
    return "".join(chr(byte) if chr(byte).isalnum() else form.format(byte) for byte in secret).encode()


def _grouped(source: bytes, offset: int, size: int, length: int, encode: Callable[[bytes], bytes]) -> bytes:
    """Return the characters that depend on `source` alone, where it begins `offset` bytes after a group."""
    bits = size * 8 // length
    first, last = -(-offset * 8 // bits), (offset + len(source)) * 8 // bits
    return encode(bytes(offset) + source)[first:last]


def _whole_groups(source: bytes, offset: int, encode: Callable[[bytes], bytes]) -> bytes:
    """Return the groups of 4 bytes that are wholly in `source`, where it begins `offset` bytes after a group."""
    first = -offset % 4
    return encode(source[first : first + (len(source) - first) // 4 * 4])


def may_contain(text: bytes, blocks: frozenset[int]) -> bool:
    """Return False if `text` certainly contains no secret that has these `SecretForms.blocks` and is not `short`."""
    return not all(blocks.isdisjoint(_blocks_in(layer)) for layer in _layers(text))


def _layers(text: bytes) -> Iterator[bytes]:
    """Yield the reduced text, then the same with its escapes decoded, if it has any: control characters, the rest."""
    yield _reduced(text)
    if b"\\" in text:
        whole = text
        for control in _CONTROLS:
            text = text.replace(control, b"")
        if len(text) < len(whole):
            yield _reduced(text)
    for _ in range(_LAYERS):
        if b"%" not in text and b"&" not in text and rb"\u" not in text and rb"\x" not in text:
            return
        decoded = _ESCAPES.sub(_character, text)
        if decoded == text:
            return
        text = decoded
        yield _reduced(text)


def _character(escape: re.Match[bytes]) -> bytes:
    code = next((int(digits, 16) for digits in escape.group(1, 2, 3, 4, 6) if digits), None)
    code = int(escape[5] or b"0") if code is None else code
    return bytes((code,)) if code < 128 else b""


@dataclass(frozen=True, slots=True)
class _Spanned:
    """A reduced text, and for each of its characters where it begins and ends in the original text."""

    text: bytes
    starts: list[int]
    ends: list[int]

    def find(self, form: bytes) -> list[tuple[int, int]]:
        """Return where the reduced text of a form occurs, as spans of the original text."""
        spans, at = [], self.text.find(form)
        while at >= 0:
            spans.append((self.starts[at], self.ends[at + len(form) - 1]))
            at = self.text.find(form, at + len(form))
        return spans


def _spanned_layers(text: bytes) -> Iterator[_Spanned]:
    """Yield what `_layers` yields, with the places of its characters."""
    starts, ends = list(range(len(text))), list(range(1, len(text) + 1))
    for number, pattern in enumerate((None, _CONTROL, *(_ESCAPES,) * _LAYERS)):
        if pattern is not None:
            before = text
            text, starts, ends = _substituted(pattern, text, starts, ends, decodes=number > 1)
            if text == before:
                continue
        kept = [at for at, byte in enumerate(text) if byte in _ALNUM]
        yield _Spanned(_reduced(text), [starts[at] for at in kept], [ends[at] for at in kept])


def _substituted(
    pattern: re.Pattern[bytes], text: bytes, starts: list[int], ends: list[int], *, decodes: bool
) -> tuple[bytes, list[int], list[int]]:
    """Decode or leave out what `pattern` matches; return the text with the places of its characters."""
    made, made_starts, made_ends, last = bytearray(), [], [], 0
    for hit in pattern.finditer(text):
        first, end = hit.span()
        character = _character(hit) if decodes else b""
        made += text[last:first] + character
        made_starts += starts[last:first] + [starts[first]] * len(character)
        made_ends += ends[last:first] + [ends[end - 1]] * len(character)
        last = end
    return bytes(made + text[last:]), made_starts + starts[last:], made_ends + ends[last:]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order, those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


@dataclass(slots=True)
class _Form:
    """A form: its reduced text, and the middle of it, which the search looks for."""

    name: str
    text: bytes
    middle: bytes = field(init=False)

    def __post_init__(self) -> None:
        start = max(0, (len(self.text) - _MIDDLE) // 2)
        self.middle = self.text[start : start + _MIDDLE]


def _reduced_forms(secret: bytes) -> list[_Form]:
    made: dict[bytes, str] = {}
    for name, text in forms(secret):
        made.setdefault(_reduced(text), name)
    return [_Form(name, text) for text, name in made.items() if len(text) >= _EXACT]


class SecretForms:
    """One secret in all its forms. The repr shows nothing of it."""

    def __init__(self, secret: str) -> None:
        """Prepare the search for `secret`, an ASCII text. Takes a few milliseconds."""
        raw = secret.encode()
        long = len(raw) >= _COMMON + _SHORT
        self._exact = raw if len(_reduced(raw)) < _EXACT else b""
        self._secret = raw
        self._forms = [] if self._exact else _reduced_forms(raw[_COMMON:] if long else raw)
        self._short = [form for form in self._forms if len(form.middle) < 2 * _BLOCK - 1]
        self.blocks = frozenset(
            int.from_bytes(form.middle[at : at + _BLOCK], sys.byteorder)
            for form in self._forms
            if form not in self._short
            for at in range(len(form.middle) - _BLOCK + 1)
        )
        """The blocks that a reduced text with the secret has one of, unless the secret is short."""

    def __repr__(self) -> str:
        return f"<SecretForms {len(self._forms)}>"

    @property
    def short(self) -> bool:
        """True if some forms are too short for `blocks`, so that a text must always be searched for them."""
        return bool(self._short or self._exact)

    def found(self, text: bytes) -> bool:
        """Return whether `text` contains the secret, or its middle, in any form."""
        if self._exact:
            return self._exact in text
        if b"\\" in text or b"%" in text or b"&" in text:
            return any(self._middle_in(layer) for layer in _layers(text))
        return self._middle_in(_reduced(text))

    def _middle_in(self, text: bytes) -> bool:
        if self.blocks.isdisjoint(_blocks_in(text)):
            return any(form.middle in text for form in self._short)
        return any(form.middle in text for form in self._forms)

    def mask(self, text: bytes, cover: Callable[[bytes], bytes] = _stars) -> tuple[bytes, str]:
        """Return `text` with each whole form replaced by `cover(form)`, and the name of a form; "" if none was found.

        What remains of a secret that was cut is found by `found`, but cannot be masked.
        """
        if self._exact:
            hit = self._exact in text
            return text.replace(self._exact, cover(self._exact)), "plain" if hit else ""
        name, spans = "", []
        for begin, end in self._regions(text):
            for layer in _spanned_layers(text[begin:end]):
                for form in self._whole:
                    found = layer.find(form.text)
                    name = name or (form.name if found else "")
                    spans += [(begin + first, begin + last) for first, last in found]
        masked, end = bytearray(), 0
        for first, last in _merged(spans):
            while first > end and text[first - 1 : first] == b"\\":
                first -= 1  # a mask after a backslash would not be JSON
            masked += text[end:first] + cover(text[first:last])
            end = last
        return bytes(masked + text[end:]), name

    def _regions(self, text: bytes) -> list[tuple[int, int]]:
        """Return the parts of `text` that contain the secret, with what is near them: masking the rest is slow.

        A form that is spread over more than such a part remains, and `found` finds it.
        """
        size = max(_REGION, _EXPANDED * len(self._secret))
        if len(text) <= 2 * size:
            return [(0, len(text))]
        starts = range(0, len(text) - size, size)
        hits = [at for at in starts if self.found(text[at : at + 2 * size])]
        return _merged([(max(0, at - size), at + 3 * size) for at in hits])

    @cached_property
    def _whole(self) -> list[_Form]:
        """The forms of the whole secret, then those of the part that is searched; the longest first."""
        whole = sorted(_reduced_forms(self._secret), key=lambda form: len(form.text), reverse=True)
        return whole + [form for form in self._forms if form not in whole]

    def reduced(self, text: bytes) -> bytes:
        """Return `text` in the form in which it is compared with this secret."""
        return text if self._exact else _reduced(text)

    def start_of_last(self, text: bytes, length: int) -> int:
        """Return where the last `length` characters that are compared begin in `text`."""
        size = length
        while len(self.reduced(text[len(text) - size :])) < length:
            size = min(2 * size, len(text))
        places = range(len(text) - size, len(text) + 1)
        return places[bisect_right(places, -length, key=lambda at: -len(self.reduced(text[at:]))) - 1]

    def overlap(self, text: bytes, least: int) -> int:
        """Return how many of the last characters of a text may be a part of a form that goes on.

        0 if fewer than `least` characters may. `text` is what `reduced` returned.
        """
        if self._exact:
            for length in range(min(len(self._exact) - 1, len(text)), 0, -1):
                if self._exact.startswith(text[-length:]):
                    return length
            return 0
        if len(text) < least or (least == _GRAM and text[-_GRAM:] not in self._grams):
            return 0
        length = least
        while length < len(text) and text[-length - 1 :] in self._joined:
            length += 1
        return length if text[-length:] in self._joined else 0

    def goes_on(self, text: bytes) -> int:
        """Return how many characters at the end of `text` may be a part of a form that goes on; 0 for less than 6."""
        length = self.overlap(self.reduced(text), _GRAM)
        end = text[-_NEAR:]
        if length or self._exact or not (b"\\" in end or b"%" in end or b"&" in end):
            return length
        return max(self.overlap(layer, _GRAM) for layer in _layers(_INCOMPLETE.sub(b"", text)))

    def ends_otherwise(self, text: bytes) -> bool:
        """Return True if the end of `text` alone shows that no form goes on after it. The fast way of `goes_on`."""
        end = text[-_NEAR:]
        last = self.reduced(end)[-_GRAM:]
        if len(last) < _GRAM or self._exact or last in self._grams or b"\\" in end:
            return False
        escapes = (b"%" in end or b"&" in end) and (_ESCAPES.search(end) or _INCOMPLETE.search(end))
        return not escapes

    @cached_property
    def _joined(self) -> bytes:
        return b"\0".join(form.text for form in self._forms)

    @cached_property
    def _grams(self) -> frozenset[bytes]:
        return frozenset(
            form.text[at : at + _GRAM] for form in self._forms for at in range(max(0, len(form.text) - _GRAM + 1))
        )
