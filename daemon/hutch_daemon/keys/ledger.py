"""The vault's ledger: which credentials are alive, in which version; a file beside the master key.

Versions come from one counter of the whole vault, the epoch, and are bound into the envelopes. So a row can be judged:

- its version is the one that the ledger has for it: it holds;
- its version is above the ledger's epoch: it was written and the process died before the ledger was; it holds;
- anything else is the past: a database put back from yesterday. It is refused, and stays so.

A ledger that is missing or was changed vouches for nothing that is in the database. Who can put back the ledger and
the database together can put back the past: that is the account of hutchd and root.
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
    """The ledger in memory and its file. Its methods block for a few milliseconds; the vault calls one at a time."""

    def __init__(self, path: Path, epoch: int, live: dict[str, int], trouble: str | None) -> None:
        """Hold what `open` read."""
        self.path = path
        self.epoch = epoch
        self.trouble = trouble
        """Why nothing that is in the database holds; None when all is well."""
        self._live = live

    @classmethod
    def open(cls, path: Path, keys: Sequence[MasterKey], highest: int) -> Ledger:
        """Read the ledger. `highest` is the highest version in the database, 0 when it holds no credential."""
        content = durable.read(path)
        page = None if content is None else _page(content, keys)
        if page is not None:
            return cls(path, page.epoch, dict(page.live), None)
        if content is None and highest == 0:
            fresh = cls(path, 0, {}, None)
            fresh.write(keys[0])
            return fresh
        what = "is missing" if content is None else "was changed or belongs to another master key"
        return cls(path, highest, {}, f"{path} {what}, so no stored key can be told from an old one: add the keys anew")

    def holds(self, credential: str, version: int) -> bool:
        """Tell whether a row of the database is the present, not the past."""
        return version > self.epoch or self._live.get(credential) == version

    def keep(self, key: MasterKey, rows: Iterable[tuple[str, int]]) -> None:
        """Note versions that are in the database. OSError when it cannot be made durable: they hold all the same."""
        for credential, version in rows:
            self._live[credential] = version
            self.epoch = max(self.epoch, version)
        self.write(key)

    def strike(self, key: MasterKey, credential: str) -> None:
        """Let a credential hold no more. OSError when that could not be made durable."""
        self._live.pop(credential, None)
        self.epoch += 1
        self.write(key)

    def write(self, key: MasterKey) -> None:
        """Write the file, vouched for by `key`."""
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
