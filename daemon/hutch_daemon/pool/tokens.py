"""Issues and checks the tokens with which executors authenticate. Pure; reads no clock.

A token is 256 random bits, and only its SHA-256 is stored. Unlike a password it cannot be guessed, so one hash is
enough. Lifetimes are in milliseconds on the machine's monotonic clock, which stands still while the machine sleeps. The
clock starts again at each boot, so a token's row contains the id of the boot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_token
from hutch_shared.secret import Secret

__all__ = ["LIFETIME", "MAXIMUM_USES", "IssuedToken", "admit", "hash_of", "issue", "renewal_due", "renewed"]

LIFETIME: Final = 24 * 3600 * 1000
"""The lifetime of a token, in ms on the monotonic clock."""
MAXIMUM_USES: Final = 10_000
"""The number of successful hellos that a token allows. An executor that dials in more often is broken."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A new token. Everything except `secret` is stored."""

    secret: Secret
    hash: bytes
    until: int
    """The time when it expires, in ms on the monotonic clock."""
    maximum: int
    """The number of hellos that it allows."""


def hash_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def issue(now: int, *, lifetime: int = LIFETIME, maximum: int = MAXIMUM_USES) -> IssuedToken:
    """Return a new token that is valid from `now` for `lifetime` ms."""
    secret = Secret(new_token())
    return IssuedToken(secret, hash_of(secret.reveal()), now + lifetime, maximum)


def admit(row: ExecutorRow, now: int, boot_id: str, *, proven: bool) -> None:
    """Raise `token_unknown` (revoked) or `token_expired` if the token of `row` does not admit another hello.

    `proven`: the peer is known to be the process of a leased executor. It is admitted even after the token expired,
    because hutchd may have been unable to renew the token during an outage.
    """
    if row.state in ("gone", "quarantined"):
        raise HutchError(Reason.TOKEN_UNKNOWN, "The token was revoked: its executor was given up.")
    if row.token_uses >= row.token_max_uses:
        raise HutchError(Reason.TOKEN_EXPIRED, f"The token was used {row.token_uses} times; it is not valid any more.")
    if not proven and (row.boot_id != boot_id or now >= row.token_until):
        raise HutchError(Reason.TOKEN_EXPIRED)


def renewed(row: ExecutorRow, now: int, *, lifetime: int = LIFETIME) -> int | None:
    """Return a token's new expiry, or None while more than half of its lifetime is left.

    The token itself stays the same, so that a crash between two writes cannot lock an executor out.
    """
    return now + lifetime if row.token_until - now < lifetime // 2 else None


def renewal_due(until: int, *, lifetime: int = LIFETIME) -> int:
    """Return the time when half the lifetime of a token that expires at `until` is over."""
    return until - lifetime // 2
