"""hutchd's record of granted leases: requests in portions, refills, ends. Without a broker."""

from __future__ import annotations

from typing import Any

import pytest

from hutch_daemon.keys.lease_book import GrantedLease, LeaseBook
from hutch_daemon.settings import BrokerSettings, Settings, SettingsInForce
from hutch_shared import broker_link as link

SETTINGS = BrokerSettings(requests=100, lease=60.0)


def lease(name: str = "l-1", **changes: Any) -> link.Lease:
    facts: dict[str, Any] = {
        "id": name,
        "token_hash": "",
        "session": "s-1",
        "executor": "x-1",
        "owner": 1000,
        "account": "somebody",
        "provider": "anthropic",
        "dialect": "anthropic",
        "credential": "k-1",
        "uid": 1000,
        "pid": 1,
        "start_time": 1,
        **changes,
    }
    return link.Lease(**facts)


def record(n: int, name: str = "l-1", **changes: Any) -> link.Record:
    return link.Record(n=n, at=0, lease=name, session="s-1", path="/v1/messages", status=200, **changes)


def book_with(*granted: GrantedLease) -> LeaseBook:
    book = LeaseBook(SettingsInForce(Settings(broker=SETTINGS)))
    for one in granted:
        book.add(one)
    return book


@pytest.mark.parametrize(("requests", "refills"), [(9, []), (10, [("l-1", 10)])])
def test_requests_are_refilled_from_a_tenth_of_the_portion_on(requests: int, refills: list[tuple[str, int]]) -> None:
    """Below a tenth, hutchd sends the broker nothing."""
    book = book_with(GrantedLease(lease(), None))

    due = book.count([record(n) for n in range(1, requests + 1)])

    assert [(refill.lease, refill.requests) for refill in due] == refills


def test_refused_paid_and_foreign_records_are_not_refilled() -> None:
    """A refusal used nothing, an earlier portion paid records up to `paid_until`, and an unknown lease gets nothing."""
    book = book_with(GrantedLease(lease(), None, paid_until=50))

    refused = [record(60 + n, refused="no") for n in range(20)]
    paid = [record(n) for n in range(31, 51)]
    foreign = [record(100 + n, "l-9") for n in range(20)]

    assert book.count([*refused, *paid, *foreign]) == []
    assert [refill.requests for refill in book.count([record(51 + n) for n in range(10)])] == [10]


def test_a_kept_lease_is_topped_up_and_a_missing_one_starts_over() -> None:
    """A broker that kept the lease gets the missing requests; one that lost it gets all, and what the budget leaves."""
    granted = GrantedLease(lease(), 5.0, requests=7)
    book = book_with(granted)

    refill = book.top_up(granted, link.LeaseState(lease=granted.lease, expires_in=1.0, requests=40))
    full = book.top_up(granted, link.LeaseState(lease=granted.lease, expires_in=1.0, requests=400))
    state = book.fresh(granted, 3.5)

    assert (refill.requests, full.requests) == (60, 0)
    assert (state.requests, state.usd, state.expires_in, granted.requests) == (100, 3.5, 60.0, 0)


def test_an_ended_lease_is_remembered_until_the_broker_knows() -> None:
    """The lease is no longer live and is listed as ended, even if this hutchd never granted it."""
    book = book_with(GrantedLease(lease(), None), GrantedLease(lease("l-2", credential="k-2"), None))

    book.end([*book.select(lambda one: one.credential == "k-2"), "l-7"])

    assert set(book.live) == {"l-1"}
    assert book.ended == {"l-2", "l-7"}
    assert (book.sessions_of("k-1"), book.sessions_of("k-2")) == (("s-1",), ())
