"""Tokens: when they are valid, measured in awake time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hutch_daemon.pool.tokens import LIFETIME, MAXIMUM_USES, admit, hash_of, issue, renewed
from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError, Reason

NOW = 5_000


def row(**changes: object) -> ExecutorRow:
    """Return an executor with a fresh token."""
    issued = issue(NOW)
    fresh = ExecutorRow(
        id="x-1",
        account="a",
        uid=1,
        agent="script",
        environment="fake",
        created_at=0,
        token_hash=issued.hash,
        boot_id="boot-1",
        token_until=issued.until,
        token_max_uses=issued.maximum,
        state="ready",
    )
    return replace(fresh, **changes)  # type: ignore[arg-type]


def test_a_token_is_stored_as_its_hash() -> None:
    """The hash reveals nothing of the token, and two tokens differ."""
    one, other = issue(NOW), issue(NOW)

    assert one.hash == hash_of(one.secret.reveal())
    assert len(one.hash) == 32
    assert one.secret != other.secret
    assert one.until == NOW + LIFETIME


def test_a_fresh_token_is_valid() -> None:
    """It expires after its lifetime of awake time."""
    admit(row(), NOW, "boot-1", proven=False)
    admit(row(), NOW + LIFETIME - 1, "boot-1", proven=False)


@pytest.mark.parametrize(
    ("changes", "now", "boot", "reason"),
    [
        ({}, NOW + LIFETIME, "boot-1", Reason.TOKEN_EXPIRED),
        ({}, NOW, "boot-2", Reason.TOKEN_EXPIRED),
        ({"token_uses": MAXIMUM_USES}, NOW, "boot-1", Reason.TOKEN_EXPIRED),
        ({"state": "gone"}, NOW, "boot-1", Reason.TOKEN_UNKNOWN),
        ({"state": "quarantined"}, NOW, "boot-1", Reason.TOKEN_UNKNOWN),
    ],
)
def test_an_invalid_token_is_refused(changes: dict[str, object], now: int, boot: str, reason: Reason) -> None:
    """Its expiry, another boot, too many uses or its executor's end make it invalid."""
    with pytest.raises(HutchError) as refused:
        admit(row(**changes), now, boot, proven=False)

    assert refused.value.reason is reason


def test_an_expired_token_admits_its_proven_process_unless_revoked() -> None:
    """An outage in which hutchd could not renew it locks no executor out."""
    admit(row(), NOW + LIFETIME, "boot-1", proven=True)

    with pytest.raises(HutchError):
        admit(row(state="gone"), NOW, "boot-1", proven=True)


def test_renewal_moves_the_expiry_once_half_the_time_is_over() -> None:
    """A younger token stays unchanged; an older one gets its full lifetime again."""
    later = NOW + LIFETIME // 2 + 1

    assert renewed(row(), NOW) is None
    assert renewed(row(), later) == later + LIFETIME
