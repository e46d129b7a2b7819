"""Finds known secrets in the texts of agents, in the forms in which secrets usually leak. Pure.

Theory. The forms of a secret are: unchanged, reversed, in hexadecimal, in base64 at each of the three alignments in a
longer text, escaped for a URL, and escaped for JSON. The search looks for either half of each form, without the prefix
that all keys of a provider share. So it also finds a secret that was cut, or broken over two lines. A whole form is
masked. A part of a form cannot be masked reliably, so its text must be withheld.

A batch of texts is searched at once, with newlines removed: one long search is faster than many short ones. `Splits`
finds a secret that arrives in pieces, over several events; the first of these events are already stored then.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

__all__ = ["MASK", "KnownSecrets", "Masked", "Splits", "forms"]

MASK: Final = b"[masked by hutch]"
_COMMON: Final = 14
"""The length of the prefix that keys of a provider may share (`sk-ant-api03-`)."""
_SHORT: Final = 20
"""The number of characters after the prefix below which the search looks for the whole secret, not for its halves."""
_KEPT: Final = 64
"""The number of secrets remembered. The least recently used secret is forgotten first."""
_STREAMS: Final = 64


@dataclass(frozen=True, slots=True)
class Masked:
    """A masked text. `whole` is False if it still contains a part of the secret that cannot be masked."""

    text: bytes
    key: str
    form: str
    whole: bool


@dataclass(frozen=True, slots=True)
class _Needles:
    whole: tuple[tuple[str, bytes], ...]
    pieces: tuple[bytes, ...]


def forms(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the forms of a secret with their names. Where context changes the ends of a form, yield its inner part."""
    yield "plain", secret
    text = secret.decode()
    once = json.dumps(text)[1:-1]
    yield "JSON", once.encode()
    yield "JSON", json.dumps(once)[1:-1].encode()
    for escaped in (quote(text, safe=""), quote(text)):
        yield "URL", escaped.encode()
        yield "URL", escaped.replace("%", "%25").encode()
    yield "reversed", secret[::-1]
    yield "hex", secret.hex().encode()
    yield "hex", secret.hex().upper().encode()
    for offset in range(3):
        first, last = -(-offset * 8 // 6), (offset + len(secret)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield "base64", encode(bytes(offset) + secret)[first:last]


def _needles(secret: bytes) -> _Needles:
    long = len(secret) >= _COMMON + _SHORT
    body = secret[_COMMON:] if long else secret
    whole: dict[bytes, str] = {}
    for name, form in forms(secret):
        whole.setdefault(form, name)
    pieces: dict[bytes, None] = {}
    for _, form in forms(body):
        half = len(form) // 2
        pieces |= dict.fromkeys((form[:half], form[half:]) if long else (form,))
    longest_first = sorted(whole, key=len, reverse=True)
    return _Needles(tuple((whole[form], form) for form in longest_first), tuple(pieces))


class KnownSecrets:
    """The secrets that were used or given to executors, with the ids of their keys. The repr contains no secret."""

    def __init__(self) -> None:
        """Start without secrets."""
        self._known: OrderedDict[str, tuple[str, _Needles]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __repr__(self) -> str:
        return f"<KnownSecrets {len(self._known)}>"

    @property
    def reach(self) -> int:
        """The length, in bytes, of the longest piece that the search looks for."""
        return max((len(piece) for _, needles in self._known.values() for piece in needles.pieces), default=0)

    def learn(self, key: str, secret: str) -> None:
        """Search for this secret from now on, and still for the one that it replaces. Ignored below 8 characters."""
        if len(secret) < 8:
            return
        if secret not in self._known:
            self._known[secret] = (key, _needles(secret.encode()))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(secret)

    def find(self, *texts: bytes) -> str | None:
        """Return the key of a secret if one of `texts` contains a piece of it, or None. This is the hot path."""
        if not self._known:
            return None
        joined = b"\0".join(texts)
        for line_end in (b"\\\\n", b"\\n", b"\n"):  # a newline in JSON inside JSON, in JSON, in text
            joined = joined.replace(line_end, b"")
        for key, needles in self._known.values():
            for piece in needles.pieces:
                if piece in joined:
                    return key
        return None

    def mask(self, text: bytes) -> Masked | None:
        """Return `text` with every secret masked, or None if it contains none."""
        key = self.find(text)
        if key is None:
            return None
        found = ""
        for _, needles in self._known.values():
            for name, form in needles.whole:
                if form in text:
                    text, found = text.replace(form, MASK), found or name
        return Masked(text, key, found or "broken", self.find(text) is None)

    def mask_text(self, text: str) -> str:
        """Return a text for users with its secrets masked. If a secret cannot be masked, the whole text is replaced."""
        masked = self.mask(text.encode(errors="replace"))
        if masked is None:
            return text
        return masked.text.decode(errors="replace") if masked.whole else MASK.decode()


class Splits:
    """Finds secrets that arrive in pieces, over several texts of a stream. Watches many streams at once."""

    def __init__(self, known: KnownSecrets) -> None:
        """Search for the secrets in `known`."""
        self._known = known
        self._tails: OrderedDict[object, bytes] = OrderedDict()

    def feed(self, stream: object, text: str) -> str | None:
        """Take the next text of a stream; return the key of a secret that a piece of it completes, or None.

        A secret is reported at most twice, since either half of it is a piece. If there are too many streams, the one
        that was fed least recently is forgotten.
        """
        seen = self._tails.pop(stream, b"") + text.encode(errors="replace")
        key = self._known.find(seen)
        self._tails[stream] = b"" if key is not None else seen[-self._known.reach :]
        if len(self._tails) > _STREAMS:
            self._tails.popitem(last=False)
        return key

    def forget(self, streams: Iterable[object]) -> None:
        """Forget streams that have ended."""
        for stream in streams:
            self._tails.pop(stream, None)
