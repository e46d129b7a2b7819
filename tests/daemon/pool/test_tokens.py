"""Tokens: when one is good, counted in time awake."""

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
    """What is stored tells nothing of the token, and two tokens differ."""
    one, other = issue(NOW), issue(NOW)

    assert one.hash == hash_of(one.secret.reveal())
    assert len(one.hash) == 32
    assert one.secret != other.secret
    assert one.until == NOW + LIFETIME


def test_a_fresh_token_is_admitted() -> None:
    """It is good until its time awake is over."""
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
def test_a_token_is_refused(changes: dict[str, object], now: int, boot: str, reason: Reason) -> None:
    """Its time, its boot, its uses and its executor's end each make an end of it."""
    with pytest.raises(HutchError) as refused:
        admit(row(**changes), now, boot, proven=False)

    assert refused.value.reason is reason


def test_a_proven_process_outlives_its_tokens_time_but_not_its_revocation() -> None:
    """An outage in which nobody could renew it locks nobody out."""
    admit(row(), NOW + LIFETIME, "boot-1", proven=True)

    with pytest.raises(HutchError):
        admit(row(state="gone"), NOW, "boot-1", proven=True)


def test_renewal_moves_the_expiry_once_half_the_time_is_over() -> None:
    """A young token stays as it is; an old one holds its full lifetime again."""
    later = NOW + LIFETIME // 2 + 1

    assert renewed(row(), NOW) is None
    assert renewed(row(), later) == later + LIFETIME
