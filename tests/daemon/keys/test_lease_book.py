"""hutchd's record of granted leases: budgets in portions, refills, ends. Without a broker."""

from __future__ import annotations

from typing import Any

import pytest

from hutch_daemon.keys.lease_book import Budget, GrantedLease, LeaseBook
from hutch_daemon.settings import BrokerSettings, Settings, SettingsInForce
from hutch_shared import broker_link as link

SETTINGS = BrokerSettings(requests=100, usd=2.0, lease=60.0)


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


def test_a_portion_is_taken_from_the_budget_while_it_lasts() -> None:
    """The last portion is the remainder; a lease without a budget has no limit in dollars."""
    budget = Budget(3.0)
    one, two = GrantedLease(lease(), budget), GrantedLease(lease("l-2"), budget)
    book = book_with(one, two)

    portions = [book.with_portion(one).usd, book.with_portion(two).usd, book.with_portion(one).usd]

    assert portions == [2.0, 1.0, 0.0]
    assert book.with_portion(GrantedLease(lease("l-3"), None)).usd is None


def test_leases_of_a_session_share_its_budget() -> None:
    """A second lease of the session draws on the same budget; another session's lease does not."""
    budget = Budget(3.0)
    book = book_with(GrantedLease(lease(), budget), GrantedLease(lease("l-2", session="s-2"), None))

    assert book.budget_of("s-1") is budget
    assert book.budget_of("s-2") is None


@pytest.mark.parametrize(("requests", "refills"), [(9, []), (10, [("l-1", 10)])])
def test_requests_are_refilled_from_a_tenth_of_the_portion_on(requests: int, refills: list[tuple[str, int]]) -> None:
    """Below a tenth, hutchd sends the broker nothing."""
    book = book_with(GrantedLease(lease(), None))

    due = book.count([record(n) for n in range(1, requests + 1)])

    assert [(refill.lease, refill.requests) for refill in due] == refills


def test_dollars_are_refilled_from_a_tenth_of_the_portion_on() -> None:
    """A refill covers the spent dollars, within the budget, and counts each dollar once."""
    book = book_with(GrantedLease(lease(), Budget(0.5)))

    first = book.count([record(1, usd=0.19)])
    second = book.count([record(2, usd=0.11)])
    third = book.count([record(3, usd=0.9)])

    assert first == []
    assert [(refill.requests, refill.expires_in) for refill in second] == [(2, 60.0)]
    assert [refill.usd for refill in second] == [pytest.approx(0.3)]
    assert [refill.usd for refill in third] == [pytest.approx(0.2)]


def test_refused_paid_and_foreign_records_are_not_refilled() -> None:
    """A refusal used nothing, an earlier portion paid records up to `paid_until`, and an unknown lease gets nothing."""
    book = book_with(GrantedLease(lease(), None, paid_until=50))

    refused = [record(60 + n, refused="no") for n in range(20)]
    paid = [record(n) for n in range(31, 51)]
    foreign = [record(100 + n, "l-9") for n in range(20)]

    assert book.count([*refused, *paid, *foreign]) == []
    assert [refill.requests for refill in book.count([record(51 + n) for n in range(10)])] == [10]


def test_a_kept_lease_is_topped_up_and_a_missing_one_starts_over() -> None:
    """A broker that kept the lease gets the missing requests; one that lost it gets a whole portion."""
    granted = GrantedLease(lease(), Budget(5.0), requests=7, usd=0.1)
    book = book_with(granted)

    refill = book.top_up(granted, link.LeaseState(lease=granted.lease, expires_in=1.0, requests=40))
    full = book.top_up(granted, link.LeaseState(lease=granted.lease, expires_in=1.0, requests=400))
    state = book.restart(granted)

    assert (refill.requests, refill.usd, full.requests) == (60, None, 0)
    assert (state.requests, state.usd, granted.requests, granted.usd) == (100, 2.0, 0, 0.0)


def test_an_ended_lease_is_remembered_until_the_broker_knows() -> None:
    """The lease is no longer live and is listed as ended, even if this hutchd never granted it."""
    book = book_with(GrantedLease(lease(), None), GrantedLease(lease("l-2", credential="k-2"), None))

    book.end([*book.select(lambda one: one.credential == "k-2"), "l-7"])

    assert set(book.live) == {"l-1"}
    assert book.ended == {"l-2", "l-7"}
    assert (book.sessions_of("k-1"), book.sessions_of("k-2")) == (("s-1",), ())
