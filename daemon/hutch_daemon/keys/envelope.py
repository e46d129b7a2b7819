"""Envelopes for secrets at rest: each has its own data key, wrapped by the master key. Pure.

The cipher is AES-256-GCM. The associated data is the envelope's purpose (owner, provider, id, version), so a row that
is moved to another place in the database does not open. The first byte is the version of the layout.
"""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["HEAD", "KEY_BYTES", "SealError", "open_envelope", "rewrap", "seal_envelope"]

KEY_BYTES: Final = 32
_NONCE: Final = 12
_TAG: Final = 16
_LAYOUT: Final = b"\x01"
_WRAPPED: Final = _NONCE + KEY_BYTES + _TAG
HEAD: Final = len(_LAYOUT) + _WRAPPED
"""The length of an envelope's head in bytes. Only the head depends on the master key; `rewrap` replaces it."""


class SealError(ValueError):
    """The envelope does not open: wrong master key, wrong purpose, or changed bytes."""


def seal_envelope(master: bytes, purpose: str, plain: bytes) -> bytes:
    """Return an envelope: layout ‖ nonce ‖ wrapped data key ‖ nonce ‖ sealed bytes."""
    data_key = os.urandom(KEY_BYTES)
    nonce = os.urandom(_NONCE)
    sealed = AESGCM(data_key).encrypt(nonce, plain, _bound("data", purpose))
    return _LAYOUT + _wrap(master, purpose, data_key) + nonce + sealed


def open_envelope(master: bytes, purpose: str, envelope: bytes) -> bytes:
    """Return the bytes that were sealed for this purpose. Raises SealError."""
    data_key, rest = _unwrap(master, purpose, envelope)
    try:
        return AESGCM(data_key).decrypt(rest[:_NONCE], rest[_NONCE:], _bound("data", purpose))
    except (InvalidTag, ValueError):
        raise SealError("the sealed bytes were changed") from None


def rewrap(old_master: bytes, new_master: bytes, purpose: str, envelope: bytes) -> bytes:
    """Return the same envelope under another master key, without opening the secret."""
    data_key, rest = _unwrap(old_master, purpose, envelope)
    return _LAYOUT + _wrap(new_master, purpose, data_key) + rest


def _bound(part: str, purpose: str) -> bytes:
    return f"hutch/{part}/{purpose}".encode()


def _wrap(master: bytes, purpose: str, data_key: bytes) -> bytes:
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(master).encrypt(nonce, data_key, _bound("wrap", purpose))


def _unwrap(master: bytes, purpose: str, envelope: bytes) -> tuple[bytes, bytes]:
    if envelope[:1] != _LAYOUT or len(envelope) < 1 + _WRAPPED + _NONCE + _TAG:
        raise SealError("the envelope's layout is unknown")
    wrapped, rest = envelope[1 : 1 + _WRAPPED], envelope[1 + _WRAPPED :]
    try:
        return AESGCM(master).decrypt(wrapped[:_NONCE], wrapped[_NONCE:], _bound("wrap", purpose)), rest
    except InvalidTag:
        raise SealError("it was sealed with another master key, or for another purpose") from None
