"""The master key: where it comes from, in this order.

1. A systemd credential named `hutch-master-key` (`LoadCredentialEncrypted=` in the unit).
2. A file of mode 0600, owned by the daemon's account, made at first start and written whole before it gets its name.

A key file that others could read, or that is damaged, refuses to start: a new one would make every stored secret
unreadable for good.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hutch_daemon.keys.envelope import KEY_BYTES

__all__ = ["CREDENTIAL", "MasterKey", "MasterKeyError", "load_master_key"]

CREDENTIAL: Final = "hutch-master-key"


class MasterKeyError(RuntimeError):
    """There is no master key that can be used; the text says what to do."""


@dataclass(frozen=True, slots=True, repr=False)
class MasterKey:
    """The key's bytes, and where they came from in words for `hutch status`."""

    key: bytes
    source: str

    def __repr__(self) -> str:
        return f"MasterKey({self.source})"


def load_master_key(path: Path, environ: Mapping[str, str] = os.environ) -> MasterKey:
    """Return the master key; makes `path` if there is no credential and no file yet."""
    if directory := environ.get("CREDENTIALS_DIRECTORY"):
        credential = Path(directory) / CREDENTIAL
        if credential.exists():
            return MasterKey(_decode(_read(credential), credential), "systemd credential")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return MasterKey(_make(path), f"file {path}")
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
        raise MasterKeyError(
            f"{path} must be a plain file of yours with mode 0600: chmod 600 {path}, or look who made it"
        )
    return MasterKey(_decode(_read(path), path), f"file {path}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MasterKeyError(f"the master key {path} cannot be read: {error.strerror}") from None


def _decode(text: bytes, path: Path) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise MasterKeyError(f"{path} is damaged: restore it from a backup; without it no stored key can be opened")
    return key


def _make(path: Path) -> bytes:
    """Write a new key so that either the whole file is there, durably, or none; two that start at once use one key."""
    key = os.urandom(KEY_BYTES)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(key) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return _decode(_read(path), path)
    except OSError as error:
        raise MasterKeyError(f"the master key {path} cannot be made: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return key
