"""The vault's ledger: the ids of live credentials with their versions, in a file beside the master key.

One counter numbers the versions of all credentials; its last value is the epoch. The version is part of each
envelope's purpose. A database row is valid if

- the ledger lists the credential with the row's version, or
- the row's version is above the ledger's epoch: hutchd died after it stored the row and before it wrote the ledger.

Every other row is old, because the database was restored from a backup, and is refused for good.

If the ledger is missing or was changed, every row is refused. An attacker who restores an old ledger together with the
database gets old keys back, but needs root or hutchd's account for that.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hutch_daemon.keys import durable
from hutch_daemon.keys.master import MasterKey

__all__ = ["Ledger"]


class _Page(msgspec.Struct, frozen=True):
    epoch: int
    live: dict[str, int]


_decode: Final = msgspec.json.Decoder(_Page).decode


class Ledger:
    """The ledger in memory, and its file. Methods block for milliseconds; the vault makes one call at a time."""

    def __init__(self, path: Path, epoch: int, live: dict[str, int], trouble: str | None) -> None:
        """Use `open` instead. `live` maps credential ids to versions."""
        self.path = path
        self.epoch = epoch
        self.trouble = trouble
        """The reason why every stored row is refused; None if the ledger is sound."""
        self._live = live

    @classmethod
    def open(cls, path: Path, keys: Sequence[MasterKey], highest: int) -> Ledger:
        """Read the ledger. `highest` is the highest version in the database, 0 if it has no credentials."""
        content = durable.read(path)
        page = None if content is None else _page(content, keys)
        if page is not None:
            return cls(path, page.epoch, dict(page.live), None)
        if content is None and highest == 0:
            fresh = cls(path, 0, {}, None)
            fresh.write(keys[0])
            return fresh
        what = "is missing" if content is None else "was changed or belongs to another master key"
        return cls(path, highest, {}, f"{path} {what}, so no stored key is known to be current: add the keys again")

    def holds(self, credential: str, version: int) -> bool:
        """Return whether a row of the database is valid."""
        return version > self.epoch or self._live.get(credential) == version

    def keep(self, key: MasterKey, rows: Iterable[tuple[str, int]]) -> None:
        """Add stored versions. OSError if the ledger cannot be made durable; the rows are valid in that case too."""
        for credential, version in rows:
            self._live[credential] = version
            self.epoch = max(self.epoch, version)
        self.write(key)

    def strike(self, key: MasterKey, credential: str) -> None:
        """Make a credential invalid. OSError if the ledger cannot be made durable."""
        self._live.pop(credential, None)
        self.epoch += 1
        self.write(key)

    def write(self, key: MasterKey) -> None:
        """Write the file, authenticated with `key`."""
        text = msgspec.json.encode(_Page(self.epoch, self._live))
        durable.replace(self.path, text + b"\n" + _mac(key, text) + b"\n")

    def __repr__(self) -> str:
        return f"<Ledger epoch {self.epoch}, {len(self._live)} live{', ' + self.trouble if self.trouble else ''}>"


def _mac(key: MasterKey, text: bytes) -> bytes:
    own = hmac.digest(key.key, b"hutch/ledger", hashlib.sha256)
    return hmac.new(own, text, hashlib.sha256).hexdigest().encode()


def _page(content: bytes, keys: Sequence[MasterKey]) -> _Page | None:
    text, _, mac = content.partition(b"\n")
    if not any(hmac.compare_digest(_mac(key, text), mac.strip()) for key in keys):
        return None
    return _decode(text)
