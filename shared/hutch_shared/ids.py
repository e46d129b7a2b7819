"""Ids: a letter for the kind and 80 random bits in characters that a person can type.

An id does not name its owner and grants nothing; only tokens and leases grant.
"""

from __future__ import annotations

import secrets
from typing import Final, Literal

__all__ = ["KINDS", "IdKind", "new_id", "new_token"]

IdKind = Literal["session", "turn", "permission", "executor", "key", "journal", "ask", "client", "lease"]

KINDS: Final[dict[IdKind, str]] = {
    "session": "s",
    "turn": "t",
    "permission": "p",
    "executor": "x",
    "key": "k",
    "journal": "j",
    "ask": "a",
    "client": "c",
    "lease": "l",
}
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no ambiguous i, l, o, u
_LENGTH: Final = 16


def new_id(kind: IdKind) -> str:
    """Return a fresh id such as `s-4k7q…`: the kind's letter, a dash, 16 characters."""
    return f"{KINDS[kind]}-{''.join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))}"


def new_token() -> str:
    """Return 256 random bits as 43 URL-safe characters."""
    return secrets.token_urlsafe(32)
