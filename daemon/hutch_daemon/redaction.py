"""Finds known secrets in the texts of agents, in the forms in which secrets usually leak. Pure.

`hutch_shared.secret_forms` lists the forms. A whole form is masked. A part of a form cannot be masked reliably, so its
text must be withheld. A batch of texts is searched at once: one long search is faster than many short ones. `Splits`
finds a secret that arrives in pieces, over several events; the first of these events are already stored then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hutch_shared.secret_forms import SecretForms, may_contain

__all__ = ["MASK", "KnownSecrets", "Masked", "Splits"]

MASK: Final = b"[masked by hutch]"
_KEPT: Final = 64
"""The number of secrets remembered. The least recently used secret is forgotten first."""
_STREAMS: Final = 64
_REACH: Final = 512
"""The number of bytes before a piece of a stream that are searched together with it."""


@dataclass(frozen=True, slots=True)
class Masked:
    """A masked text. `whole` is False if it still contains a part of the secret that cannot be masked."""

    text: bytes
    key: str
    form: str
    whole: bool


class KnownSecrets:
    """The secrets that were used or given to executors, with the ids of their keys. The repr contains no secret."""

    def __init__(self) -> None:
        """Start without secrets."""
        self._known: OrderedDict[str, tuple[str, SecretForms]] = OrderedDict()
        self._blocks: frozenset[int] = frozenset()
        self._short: tuple[tuple[str, SecretForms], ...] = ()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __repr__(self) -> str:
        return f"<KnownSecrets {len(self._known)}>"

    def learn(self, key: str, secret: str) -> None:
        """Search for this secret from now on, and still for the one that it replaces. Ignored below 8 characters."""
        if len(secret) < 8:
            return
        if secret not in self._known:
            self._known[secret] = (key, SecretForms(secret))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            self._blocks = frozenset().union(*(one.blocks for _, one in self._known.values()))
            self._short = tuple(known for known in self._known.values() if known[1].short)
        self._known.move_to_end(secret)

    def find(self, *texts: bytes) -> str | None:
        """Return the key of a secret if one of `texts` contains it or its middle, or None. This is the hot path."""
        if not self._known:
            return None
        joined = b"\0".join(texts)
        suspects = self._known.values() if may_contain(joined, self._blocks) else self._short
        return next((key for key, one in suspects if one.found(joined)), None)

    def mask(self, text: bytes) -> Masked | None:
        """Return `text` with every secret masked, or None if it contains none."""
        key = self.find(text)
        if key is None:
            return None
        found = ""
        for _, one in self._known.values():
            if one.found(text):
                text, form = one.mask(text, lambda _: MASK)
                found = found or form
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

        If there are too many streams, the one that was fed least recently is forgotten.
        """
        seen = self._tails.pop(stream, b"") + text.encode(errors="replace")
        key = self._known.find(seen)
        self._tails[stream] = b"" if key is not None else seen[-_REACH:]
        if len(self._tails) > _STREAMS:
            self._tails.popitem(last=False)
        return key

    def forget(self, streams: Iterable[object]) -> None:
        """Forget streams that have ended."""
        for stream in streams:
            self._tails.pop(stream, None)
