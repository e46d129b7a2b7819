"""The master key: where it comes from, and how another one takes its place.

The first of these that is there is in use; the others that are there still open what was sealed with them:

1. A systemd credential named `hutch-master-key` (`LoadCredentialEncrypted=` in the unit), and `hutch-master-key-old`.
2. The OS keyring, where the settings say so.
3. A file of mode 0600, owned by the daemon's account, made at first start.

A key file that others could read, or that is damaged, refuses to start: a new one would make every stored secret
unreadable for good. A rotation makes the new key beside the old one (`….next`), seals anew what there is, and then
puts it in the old one's place, which destroys the old one. Interrupted anywhere, it goes on at the next start.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol

from hutch_daemon.keys import durable
from hutch_daemon.keys.envelope import KEY_BYTES
from hutch_shared.failpoints import failpoint

__all__ = ["CREDENTIAL", "MasterKey", "MasterKeyError", "MasterKeys", "load_master_keys"]

CREDENTIAL: Final = "hutch-master-key"
_SERVICE: Final = "hutch"


class MasterKeyError(RuntimeError):
    """There is no master key that can be used; the text says what to do."""


@dataclass(frozen=True, slots=True)
class MasterKey:
    """One master key: its bytes, and where they came from in words for `hutch status` and `hutch doctor`."""

    key: bytes = field(repr=False)
    source: str

    @property
    def mark(self) -> str:
        """A name that tells it from others and nothing about it: rows say by it what they are wrapped with."""
        return hashlib.sha256(b"hutch/master/" + self.key).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"MasterKey({self.source})"


class _Home(Protocol):
    """Where a master key is kept and can be changed."""

    def read(self) -> MasterKey | None: ...

    def make(self) -> MasterKey:
        """Keep a new key unless there is one; return the one that is kept then, durably."""
        ...

    def take_over(self, other: _Home) -> None:
        """Move this key, which must be there, into the place of `other`, whose key is gone then. Atomic."""
        ...


@dataclass(frozen=True, slots=True)
class _FileHome:
    path: Path

    def read(self) -> MasterKey | None:
        try:
            text = durable.read(self.path)
        except durable.UnsafeFileError as error:
            raise MasterKeyError(f"{error}: chmod 600 {self.path}, or look who made it") from None
        except OSError as error:
            raise MasterKeyError(f"the master key {self.path} cannot be read: {error.strerror}") from None
        return None if text is None else MasterKey(_decode(text, str(self.path)), f"file {self.path}")

    def make(self) -> MasterKey:
        try:
            durable.write_new(self.path, base64.b64encode(os.urandom(KEY_BYTES)) + b"\n")
        except OSError as error:
            raise MasterKeyError(f"the master key {self.path} cannot be made: {error.strerror}") from None
        found = self.read()
        assert found is not None
        return found

    def take_over(self, other: _Home) -> None:
        assert isinstance(other, _FileHome)
        old = os.open(other.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.path.rename(other.path)
            failpoint("keys.master.renamed")
            durable.sync_directory(other.path.parent)
            durable.destroy(old)
        finally:
            os.close(old)


@dataclass(frozen=True, slots=True)
class _KeyringHome:
    keyring: ModuleType
    name: str

    def read(self) -> MasterKey | None:
        try:
            text = self.keyring.get_password(_SERVICE, self.name)
        except Exception as error:  # noqa: BLE001  # its back ends raise what they like
            raise MasterKeyError(f"the keyring cannot be read: {type(error).__name__}") from None
        return None if text is None else MasterKey(_decode(text.encode(), f"keyring entry {self.name}"), "keyring")

    def make(self) -> MasterKey:
        if (found := self.read()) is not None:
            return found
        self.set(base64.b64encode(os.urandom(KEY_BYTES)).decode())
        made = self.read()
        if made is None:
            raise MasterKeyError("the keyring did not keep the master key")
        return made

    def take_over(self, other: _Home) -> None:
        assert isinstance(other, _KeyringHome)
        key = self.read()
        assert key is not None
        other.set(base64.b64encode(key.key).decode())
        self.keyring.delete_password(_SERVICE, self.name)

    def set(self, text: str) -> None:
        """Keep `text` in place of what was there."""
        try:
            self.keyring.set_password(_SERVICE, self.name, text)
        except Exception as error:  # noqa: BLE001  # as above
            raise MasterKeyError(f"the keyring cannot be written: {type(error).__name__}") from None


@dataclass(slots=True)
class MasterKeys:
    """The key in use, those that still open older envelopes, and the way from one to the next."""

    current: MasterKey
    older: tuple[MasterKey, ...]
    _homes: tuple[_Home, _Home] | None
    """Where the key is, and where the next one is made; None where it is not ours to change."""

    @property
    def source(self) -> str:
        """Where the key in use comes from, in words."""
        return self.current.source

    def all(self) -> tuple[MasterKey, ...]:
        """Return the keys that may open an envelope, the one in use first."""
        return self.current, *self.older

    def begin_rotation(self) -> None:
        """Make the next key and use it from now on; one that was begun goes on. Blocks."""
        if self._homes is None:
            raise MasterKeyError(
                f"the master key is a {self.source}: give the new one as {CREDENTIAL} and the one in use now as "
                f"{CREDENTIAL}-old, restart hutchd, and take the old one out when `hutch doctor` says that it is unused"
            )
        new = self._homes[1].make()
        if new.key != self.current.key:
            self.older = self.all()
            self.current = new

    def finish_rotation(self) -> None:
        """Put the next key, when there is one, in the place of the old, which is gone then. Blocks."""
        if self._homes is None or self._homes[1].read() is None:
            return
        before = self._homes[0].read()
        self._homes[1].take_over(self._homes[0])
        self.older = tuple(one for one in self.older if before is None or one.key != before.key)
        now = self._homes[0].read()
        assert now is not None
        self.current = now

    def __repr__(self) -> str:
        return f"<MasterKeys {self.source}, {len(self.older)} older>"


def load_master_keys(path: Path, environ: Mapping[str, str] = os.environ, *, keyring: bool = False) -> MasterKeys:
    """Return the keys that are there; where there is none, one is made: in the keyring if wanted, else in `path`."""
    files = (_FileHome(path), _FileHome(path.with_name(f"{path.name}.next")))
    homes: list[tuple[_Home, _Home]] = [files]
    if keyring:
        module = _keyring()
        homes.insert(0, (_KeyringHome(module, "master-key"), _KeyringHome(module, "master-key.next")))
    given = list(_credentials(environ))
    found = [(key, pair) for pair in homes for home in reversed(pair) if (key := home.read()) is not None]
    if not given and not any(pair is homes[0] for _, pair in found):
        found.insert(0, (homes[0][0].make(), homes[0]))
    keys = [*given, *(key for key, _ in found)]
    return MasterKeys(keys[0], tuple(keys[1:]), None if given else homes[0])


def _credentials(environ: Mapping[str, str]) -> list[MasterKey]:
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory or not (Path(directory) / CREDENTIAL).exists():
        return []
    keys = []
    for name in (CREDENTIAL, f"{CREDENTIAL}-old"):
        path = Path(directory) / name
        try:
            keys.append(MasterKey(_decode(path.read_bytes(), str(path)), "systemd credential"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MasterKeyError(f"the master key {path} cannot be read: {error.strerror}") from None
    return keys


def _keyring() -> ModuleType:
    try:
        return import_module("keyring")  # slow
    except ImportError:
        raise MasterKeyError("[keys] keyring needs an extra: pip install 'hutch[keyring]'") from None


def _decode(text: bytes, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise MasterKeyError(f"{where} is damaged: restore it from a backup; without it no stored key can be opened")
    return key
