"""The master key: its sources, and its rotation.

The first of these sources that has a key is used. Keys of the other sources still open envelopes sealed with them:

1. A systemd credential named `hutch-master-key` (`LoadCredentialEncrypted=` in the unit), and `hutch-master-key-old`.
2. The OS keyring, if the settings choose it.
3. A file of mode 0600, owned by the daemon's account, made at the first start.

If the key file is damaged, or other accounts can read it, hutchd does not start. It does not make a new key, which
would make every stored secret unreadable for good. A rotation makes the new key beside the old one (`….next`), rewraps
the envelopes, and then moves the new key over the old one, which destroys the old one. An interrupted rotation
continues at the next start.
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
from hutch_daemon.settings import Settings
from hutch_shared.failpoints import failpoint
from hutch_shared.paths import Paths

__all__ = ["CREDENTIAL", "MasterKey", "MasterKeyError", "MasterKeys", "load_master_keys", "master_file"]

CREDENTIAL: Final = "hutch-master-key"
_SERVICE: Final = "hutch"


class MasterKeyError(RuntimeError):
    """No master key can be used; the text says what to do."""


@dataclass(frozen=True, slots=True)
class MasterKey:
    """A master key: its bytes, and its source in words for `hutch status` and `hutch doctor`."""

    key: bytes = field(repr=False)
    source: str

    @property
    def mark(self) -> str:
        """An id of the key, which does not reveal it. Each row stores the mark of the master key that wraps it."""
        return hashlib.sha256(b"hutch/master/" + self.key).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"MasterKey({self.source})"


class _KeyStore(Protocol):
    """A place where a master key is kept and can be changed."""

    def read(self) -> MasterKey | None: ...

    def make(self) -> MasterKey:
        """Make a key if there is none. Return the stored key, which is durable."""
        ...

    def take_over(self, other: _KeyStore) -> None:
        """Move this store's key to `other`, atomically; the old key of `other` is destroyed. Both keys must exist."""
        ...


@dataclass(frozen=True, slots=True)
class _FileStore:
    path: Path

    def read(self) -> MasterKey | None:
        try:
            text = durable.read(self.path)
        except durable.UnsafeFileError as error:
            raise MasterKeyError(f"{error}: run `chmod 600 {self.path}`, or find out who made it") from None
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

    def take_over(self, other: _KeyStore) -> None:
        assert isinstance(other, _FileStore)
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
        except Exception as error:  # noqa: BLE001  # keyring back ends raise exceptions of any class
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

    def take_over(self, other: _KeyStore) -> None:
        assert isinstance(other, _KeyringHome)
        key = self.read()
        assert key is not None
        other.set(base64.b64encode(key.key).decode())
        self.keyring.delete_password(_SERVICE, self.name)

    def set(self, text: str) -> None:
        """Replace the stored text."""
        try:
            self.keyring.set_password(_SERVICE, self.name, text)
        except Exception as error:  # noqa: BLE001  # a keyring may raise anything
            raise MasterKeyError(f"the keyring cannot be written: {type(error).__name__}") from None


@dataclass(slots=True)
class MasterKeys:
    """The current key, the older keys that still open envelopes, and the rotation between them."""

    current: MasterKey
    older: tuple[MasterKey, ...]
    _stores: tuple[_KeyStore, _KeyStore] | None
    """The stores of the current and of the next key; None if Hutch cannot change the key."""

    @property
    def source(self) -> str:
        """The source of the current key, in words."""
        return self.current.source

    def all(self) -> tuple[MasterKey, ...]:
        """Return the keys that may open an envelope, the current one first."""
        return self.current, *self.older

    def begin_rotation(self) -> None:
        """Make the next key, or use the one that an interrupted rotation made, as the current key. Blocks."""
        if self._stores is None:
            raise MasterKeyError(
                f"the master key is a {self.source}: give the new one as {CREDENTIAL} and the current one as "
                f"{CREDENTIAL}-old, restart hutchd, and remove the old one when `hutch doctor` reports it as unused"
            )
        new = self._stores[1].make()
        if new.key != self.current.key:
            self.older = self.all()
            self.current = new

    def finish_rotation(self) -> None:
        """Replace the old key with the next key, if there is one; the old key is destroyed. Blocks."""
        if self._stores is None or self._stores[1].read() is None:
            return
        before = self._stores[0].read()
        self._stores[1].take_over(self._stores[0])
        self.older = tuple(one for one in self.older if before is None or one.key != before.key)
        now = self._stores[0].read()
        assert now is not None
        self.current = now

    def __repr__(self) -> str:
        return f"<MasterKeys {self.source}, {len(self.older)} older>"


def master_file(paths: Paths, settings: Settings) -> Path:
    """Return the path of the master key's file. It is not used if the key comes from a keyring or from systemd."""
    return Path(settings.keys.master) if settings.keys.master is not None else paths.state / "master.key"


def load_master_keys(path: Path, environ: Mapping[str, str] = os.environ, *, keyring: bool = False) -> MasterKeys:
    """Return the existing keys. If there is none, make one: in the keyring if `keyring`, otherwise in `path`."""
    files = (_FileStore(path), _FileStore(path.with_name(f"{path.name}.next")))
    stores: list[tuple[_KeyStore, _KeyStore]] = [files]
    if keyring:
        module = _keyring()
        stores.insert(0, (_KeyringHome(module, "master-key"), _KeyringHome(module, "master-key.next")))
    given = list(_credentials(environ))
    found = [(key, pair) for pair in stores for store in reversed(pair) if (key := store.read()) is not None]
    if not given and not any(pair is stores[0] for _, pair in found):
        found.insert(0, (stores[0][0].make(), stores[0]))
    keys = [*given, *(key for key, _ in found)]
    return MasterKeys(keys[0], tuple(keys[1:]), None if given else stores[0])


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
        return import_module("keyring")  # slow to import, and an optional dependency
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
