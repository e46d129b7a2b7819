"""Known secrets, found in what agents say, in the forms in which they usually get about. Pure.

Theory. A secret is looked for as it is, backwards, in hexadecimal, in base64 at each of the three places that it can
have in a longer text, as in a URL and as in JSON. What matches whole is masked. Looking is done by halves of each form,
without the part that all keys of a maker begin with: so what was cut or broken over two lines is noticed too, and since
it cannot be masked well, its text must be withheld.

A batch is looked through at once, without its line ends: a long text takes less time for each byte than a short one.
What only comes together over several events has been stored by then: `Splits` notices that.
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
"""Characters that keys may begin with in common (`sk-ant-api03-`)."""
_SHORT: Final = 20
"""A secret that has not so many more characters is looked for in one piece."""
_KEPT: Final = 64
"""Secrets that are remembered; the ones that were used longest ago are forgotten first."""
_STREAMS: Final = 64


@dataclass(frozen=True, slots=True)
class Masked:
    """A text without the secret. `whole` False: something of it is left that cannot be masked."""

    text: bytes
    key: str
    form: str
    whole: bool


@dataclass(frozen=True, slots=True)
class _Needles:
    whole: tuple[tuple[str, bytes], ...]
    pieces: tuple[bytes, ...]


def forms(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each form of a secret by its name, the inner part alone where the rest depends on what is around it."""
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
    """The secrets that were handed out or used, by the id of their key. Shown to nobody."""

    def __init__(self) -> None:
        """Know none."""
        self._known: OrderedDict[str, tuple[str, _Needles]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __repr__(self) -> str:
        return f"<KnownSecrets {len(self._known)}>"

    @property
    def reach(self) -> int:
        """The length of the longest piece that is looked for."""
        return max((len(piece) for _, needles in self._known.values() for piece in needles.pieces), default=0)

    def learn(self, key: str, secret: str) -> None:
        """Look for this secret from now on; a replaced one is looked for still. One under 8 characters is none."""
        if len(secret) < 8:
            return
        if secret not in self._known:
            self._known[secret] = (key, _needles(secret.encode()))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(secret)

    def find(self, *texts: bytes) -> str | None:
        """Return the key of which something is in one of `texts`. This is the hot path."""
        if not self._known:
            return None
        joined = b"\0".join(texts)
        for line_end in (b"\\\\n", b"\\n", b"\n"):  # in JSON in JSON, in JSON, in text
            joined = joined.replace(line_end, b"")
        for key, needles in self._known.values():
            for piece in needles.pieces:
                if piece in joined:
                    return key
        return None

    def mask(self, text: bytes) -> Masked | None:
        """Return `text` with every secret masked, or None when there is none in it."""
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
        """Return a text for people without secrets; one that cannot be masked well is withheld."""
        masked = self.mask(text.encode(errors="replace"))
        if masked is None:
            return text
        return masked.text.decode(errors="replace") if masked.whole else MASK.decode()


class Splits:
    """Notices a secret that comes in pieces over the texts of one stream, of many streams at once."""

    def __init__(self, known: KnownSecrets) -> None:
        """Look for what is `known`."""
        self._known = known
        self._tails: OrderedDict[object, bytes] = OrderedDict()

    def feed(self, stream: object, text: str) -> str | None:
        """Take the next text of a stream; return the key that has come together with it. Each is told once.

        A stream that was not fed while many others were is forgotten.
        """
        said = self._tails.pop(stream, b"") + text.encode(errors="replace")
        key = self._known.find(said)
        self._tails[stream] = b"" if key is not None else said[-self._known.reach :]
        if len(self._tails) > _STREAMS:
            self._tails.popitem(last=False)
        return key

    def forget(self, streams: Iterable[object]) -> None:
        """Let streams go that have ended."""
        for stream in streams:
            self._tails.pop(stream, None)
