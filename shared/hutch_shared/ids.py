"""Names of things: a letter that tells the kind, and 80 random bits that a person can type.

An id says nothing of its owner and grants nothing; only tokens and leases do.
"""

from __future__ import annotations

import secrets
from typing import Final, Literal

__all__ = ["KINDS", "Kind", "new_id", "new_token"]

Kind = Literal["session", "turn", "permission", "executor", "key", "journal", "ask", "client", "lease"]

KINDS: Final[dict[Kind, str]] = {
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
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u to be mistaken
_LENGTH: Final = 16


def new_id(kind: Kind) -> str:
    """Return a fresh id such as `s-4k7q…`: the kind's letter, a dash, 16 characters."""
    return f"{KINDS[kind]}-{''.join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))}"


def new_token() -> str:
    """Return 256 random bits as 43 URL-safe characters."""
    return secrets.token_urlsafe(32)
