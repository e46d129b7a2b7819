"""The pool's plan: the due actions in a state at a time. One row for each case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hutch_daemon.environments.port import Account
from hutch_daemon.pool.plan import look_interval, plan
from hutch_daemon.pool.start_history import NO_FAILURES, StartHistory
from hutch_daemon.pool.view import ExecutorKey, ExecutorView, LeaseView, PoolPlan, PoolState, Retirement
from hutch_daemon.settings import ExecutorSettings

NOW = 1000.0
HUTCH, ALICE, BOB = (Account(uid, uid, name, "/") for uid, name in ((990, "hutch"), (1001, "alice"), (1002, "bob")))
CLAUDE = ExecutorKey(ALICE, "claude", "unix-user")
SCRIPT = ExecutorKey(ALICE, "script", "unix-user")
BOBS = ExecutorKey(BOB, "claude", "unix-user")
OWN = ExecutorKey(HUTCH, "claude", "same-user")
SETTINGS = ExecutorSettings(
    spares=1,
    spare_agents=("claude", "script"),
    maximum=4,
    idle_timeout=900.0,
    hello_timeout=30.0,
    heartbeat_timeout=60.0,
    lost_timeout=30.0,
    start_attempts=3,
    start_window=60.0,
)


def executor(name: str, state: Any = "leased", key: ExecutorKey = CLAUDE, **changes: Any) -> ExecutorView:
    """Return an executor with a fresh heartbeat; a leased one serves a session with a running turn."""
    fields: dict[str, Any] = {
        "session": f"s-{name}" if state == "leased" else None,
        "launching": state == "starting",
        "last_seen": NOW,
        "since": NOW,
        "checked": NOW,
    }
    return ExecutorView(name, key, state, **(fields | changes))


def pool(*executors: ExecutorView, leases: tuple[ExecutorKey, ...] = (), **changes: Any) -> PoolState:
    """Return a pool whose leases are numbered 1, 2, 3 …"""
    waiting = tuple(LeaseView(number, key) for number, key in enumerate(leases, 1))
    state = PoolState(SETTINGS, HUTCH.uid, 8, executors=executors, leases=waiting)
    return replace(state, **changes)


def failed(*times: float) -> StartHistory:
    """Return a history with failures at these times, each followed by a pause of one second."""
    history = NO_FAILURES
    for at in times:
        history = history.failed(at, "no", SETTINGS.start_window, 1.0)
    return history


def due(state: PoolState, now: float = NOW) -> PoolPlan:
    """Return the plan without its time."""
    return replace(plan(state, now), look_at=0.0)


@pytest.mark.parametrize(
    ("one", "after", "detail", "grace"),
    [
        (executor("x"), 60.0, "it was silent for 60 s", 0.0),
        (executor("x", "ready", OWN), 60.0, "it was silent for 60 s", 0.0),
        (executor("x", "starting"), 60.0, "its start was given up", 0.0),
        (executor("x", "detached", session="s-1"), 30.0, "it had no connection for 30 s", 0.0),
        (executor("x", idle_since=NOW, last_seen=NOW + 899.0), 900.0, "its session was idle", 5.0),
        (executor("x", "ready", SCRIPT, last_seen=NOW + 899.0), 900.0, "no session needed it", 2.0),
    ],
)
def test_an_executor_is_ended_at_its_deadline(one: ExecutorView, after: float, detail: str, grace: float) -> None:
    """It is not ended earlier; the plan asks to be made again at the deadline."""
    state = pool(one, leases=(CLAUDE,) if one.state == "starting" else ())

    assert due(state, NOW + after - 0.5).retire == ()
    assert due(state, NOW + after).retire == (Retirement("x", detail, grace),)
    assert plan(state, NOW + after - 0.5).look_at == NOW + after


def test_the_pool_makes_a_plan_every_few_seconds() -> None:
    """The interval is at most five seconds, and a fraction of each timeout."""
    assert plan(pool(), NOW).look_at == NOW + 5.0
    assert look_interval(ExecutorSettings(heartbeat_timeout=4.0)) == 1.0
    assert look_interval(ExecutorSettings(lost_timeout=0.001)) == 0.05


def test_a_quarantined_executor_is_checked_again() -> None:
    """The next check starts an interval after the last one ended."""
    one = executor("x", "quarantined")

    assert due(pool(one)) == PoolPlan()
    assert due(pool(one), NOW + 5.0) == PoolPlan(check=("x",))
    assert due(pool(replace(one, checking=True)), NOW + 5.0) == PoolPlan()


def test_the_oldest_lease_gets_a_ready_executor_of_its_key() -> None:
    """A ready executor of another key does not serve it; the next lease of the key gets a start."""
    state = pool(executor("script", "ready", SCRIPT), executor("claude", "ready"), leases=(CLAUDE, CLAUDE))

    assert due(state) == PoolPlan(hand_out=((1, "claude"),), start=(CLAUDE,))


def test_a_silent_spare_serves_no_session() -> None:
    """An executor that is due to end is not given to a lease."""
    state = pool(executor("x", "ready", last_seen=0.0), leases=(CLAUDE,))

    assert due(state) == PoolPlan(retire=(Retirement("x", "it was silent for 60 s"),), start=(CLAUDE,))


def test_a_lease_needs_one_start() -> None:
    """For two leases and one running start, the pool starts one more executor."""
    assert due(pool(executor("x", "starting"), leases=(CLAUDE,))) == PoolPlan()
    assert due(pool(executor("x", "starting"), leases=(CLAUDE, CLAUDE))) == PoolPlan(start=(CLAUDE,))


def test_a_lease_waits_for_the_end_of_an_abandoned_start() -> None:
    """The result of that start decides when the next one may be tried."""
    assert due(pool(executor("x", "draining", launching=True), leases=(CLAUDE,))) == PoolPlan()
    assert due(pool(executor("x", "draining"), leases=(CLAUDE,))) == PoolPlan(start=(CLAUDE,))


def test_a_start_without_a_lease_is_abandoned() -> None:
    """The newest such start is cancelled first; a start whose executor is kept as a spare goes on."""
    first, second = executor("first", "starting"), executor("second", "starting")

    assert due(pool(first, second, leases=(CLAUDE,))) == PoolPlan(abandon=("second",))
    assert due(pool(executor("x", "starting", OWN), kept=(OWN,))) == PoolPlan()


FULL = tuple(executor(f"x{at}") for at in range(SETTINGS.maximum - 1))


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (executor("last"), ()),
        (executor("last", "ready", SCRIPT), (Retirement("last", "its slot was needed", 2.0),)),
        (executor("last", idle_since=NOW - 1.0), (Retirement("last", "its slot was needed", 5.0),)),
        (executor("last", "draining"), ()),
        (executor("last", "quarantined"), ()),
    ],
    ids=["all work", "a spare", "an idle one", "one that ends anyway", "a quarantined one"],
)
def test_a_lease_without_a_slot_takes_that_of_a_spare_or_idle_executor(
    last: ExecutorView, expected: tuple[Retirement, ...]
) -> None:
    """A working executor keeps its slot. An executor that already ends frees a slot, so no other is ended."""
    assert due(pool(*FULL, last, leases=(BOBS,))) == PoolPlan(retire=expected)


def test_a_spare_is_ended_before_the_longest_idle_executor() -> None:
    """The pool ends one executor for each lease that lacks a slot."""
    spare = executor("spare", "ready", SCRIPT)
    short, long = executor("short", idle_since=NOW - 1.0), executor("long", idle_since=NOW - 2.0)
    state = pool(short, long, spare, executor("works"), leases=(BOBS, BOBS, CLAUDE))

    assert [one.executor for one in due(state).retire] == ["spare", "long", "short"]
    assert [one.executor for one in due(replace(state, leases=state.leases[:1])).retire] == ["spare"]


def test_an_account_at_its_limit_ends_one_of_its_executors() -> None:
    """Leases of other accounts do not wait for it."""
    idle, others = executor("idle", idle_since=NOW), executor("others", key=BOBS, idle_since=NOW - 5.0)
    state = pool(idle, others, leases=(CLAUDE, BOBS), account_limit=1)

    assert due(state).retire == (
        Retirement("idle", "its slot was needed", 5.0),
        Retirement("others", "its slot was needed", 5.0),
    )
    assert due(pool(idle, leases=(CLAUDE, BOBS), account_limit=1)).start == (BOBS,)


def test_the_memory_limit_stops_starts() -> None:
    """No executor is started while the executors use their whole memory limit."""
    state = pool(executor("x", rss=2048), leases=(BOBS,))

    assert due(replace(state, settings=ExecutorSettings(memory=2048))).start == ()
    assert due(state).start == (BOBS,)


def test_a_failing_account_does_not_starve_the_others() -> None:
    """It gets a quarter of the concurrent starts; abandoned starts that hang count too."""
    hanging = (executor("x1", "starting"), executor("x2", "draining", launching=True))
    state = pool(*hanging, leases=(CLAUDE, CLAUDE, CLAUDE, BOBS))

    assert due(state).start == (BOBS,)


def test_concurrent_starts_are_limited() -> None:
    """hutchd's own account may use all of them."""
    state = pool(leases=(OWN, OWN, OWN, BOBS), starts_at_once=2)

    assert due(state).start == (OWN, OWN)


def test_after_a_failure_a_lease_waits_for_the_pause() -> None:
    """Other keys do not wait; the plan asks to be made again when the pause is over."""
    state = pool(leases=(CLAUDE, BOBS), histories={CLAUDE: failed(NOW - 0.25)})

    assert due(state) == PoolPlan(start=(BOBS,))
    assert plan(state, NOW).look_at == NOW + 0.75
    assert due(state, NOW + 0.75).start == (CLAUDE, BOBS)


def test_too_many_failures_refuse_leases_until_the_window_has_passed() -> None:
    """A ready executor still serves leases."""
    state = pool(leases=(CLAUDE, BOBS), histories={CLAUDE: failed(NOW - 3.0, NOW - 2.0, NOW - 1.0)})

    assert due(state) == PoolPlan(refuse=(1,), start=(BOBS,))
    assert due(state, NOW + 57.0).start == (CLAUDE, BOBS)
    with_spare = replace(state, executors=(executor("x", "ready"),))
    assert due(with_spare) == PoolPlan(hand_out=((1, "x"),), start=(BOBS,))


def test_a_spare_is_started_once_its_delay_is_over() -> None:
    """A spare that was given to a session is replaced after the delay."""
    state = pool(kept=(OWN,), spare_at={OWN: NOW + 0.5})

    assert due(state) == PoolPlan()
    assert plan(state, NOW).look_at == NOW + 0.5
    assert due(state, NOW + 0.5) == PoolPlan(start=(OWN,))


@pytest.mark.parametrize(
    "state",
    [
        pool(executor("x", "ready", OWN), kept=(OWN,)),
        pool(executor("x", "starting", OWN), kept=(OWN,)),
        pool(executor("x", "detached", OWN), kept=(OWN,)),
        pool(*(executor(f"x{at}") for at in range(4)), kept=(OWN,)),
        pool(kept=(CLAUDE,)),
        pool(kept=(ExecutorKey(HUTCH, "gemini", "same-user"),)),
        pool(kept=(OWN,), histories={OWN: failed(NOW)}),
        pool(kept=(OWN,), stopping=True),
    ],
    ids=[
        "one is ready",
        "one starts",
        "one may come back",
        "no room",
        "account without a session",
        "agent without spares",
        "after a failure",
        "hutchd stops",
    ],
)
def test_no_spare_is_started(state: PoolState) -> None:
    """Reasons: one exists, it has no slot, or the settings want none."""
    assert due(state) == PoolPlan()


def test_another_account_keeps_its_spare_while_it_has_a_session() -> None:
    """Without a session its spare is surplus, as is each spare beyond the configured number."""
    ready, old = executor("spare", "ready", since=NOW - 900.0), executor("old", "ready", OWN, since=NOW - 900.0)

    assert due(pool(ready, executor("works"), kept=(CLAUDE,))) == PoolPlan()
    assert due(pool(ready, kept=(CLAUDE,))).retire == (Retirement("spare", "no session needed it", 2.0),)
    assert due(pool(old, kept=(OWN,))) == PoolPlan()


def test_spares_above_the_number_are_ended_at_once() -> None:
    """The newest are ended; a ready executor that a lease gets is none; an agent without spares has none."""
    two = executor("one", "ready", OWN), executor("two", "ready", OWN)
    odd = executor("odd", "ready", ExecutorKey(HUTCH, "gemini", "same-user"))

    assert due(pool(*two, kept=(OWN,))).retire == (Retirement("two", "no session needed it", 2.0),)
    assert due(pool(*two, kept=(OWN,), leases=(OWN,))) == PoolPlan(hand_out=((1, "one"),))
    assert due(pool(odd)).retire == (Retirement("odd", "no session needed it", 2.0),)
    starts = executor("first", "starting", OWN), executor("second", "starting", OWN)
    assert due(pool(*starts, kept=(OWN,))).abandon == ("second",)
    assert due(pool(two[0], *starts, kept=(OWN,))).abandon == ("first", "second")


def test_an_outdated_executor_is_never_handed_out() -> None:
    """A spare or a start that was made of something else is replaced by one that matches; a session's one stays."""
    spare, start = executor("spare", "ready", outdated=True), executor("start", "starting", outdated=True)
    why = "the settings, its account or Hutch's files changed after its start"

    assert due(pool(spare, leases=(CLAUDE,))) == PoolPlan(retire=(Retirement("spare", why, 2.0),), start=(CLAUDE,))
    assert due(pool(start, leases=(CLAUDE,))) == PoolPlan(abandon=("start",), start=(CLAUDE,))
    assert due(pool(executor("leased"), kept=(CLAUDE,))).retire == ()
    replaced = due(pool(replace(spare, key=OWN), kept=(OWN,)))
    assert (replaced.retire, replaced.start) == ((Retirement("spare", why, 2.0),), (OWN,))


def test_accounts_that_differ_only_in_groups_are_one_kind() -> None:
    """Its groups belong to what an executor is made of, so that a change does not double the spares."""
    assert ExecutorKey(replace(ALICE, groups=(1, 2)), "claude", "unix-user") == CLAUDE
    assert ExecutorKey(replace(ALICE, uid=5), "claude", "unix-user") != CLAUDE
    assert ExecutorKey(replace(ALICE, name="ally"), "claude", "unix-user") != CLAUDE


def test_leases_take_precedence_over_spares() -> None:
    """The last free slot goes to the session; with two free slots, both start."""
    state = pool(*FULL, leases=(BOBS,), kept=(OWN,))

    assert due(state).start == (BOBS,)
    assert due(replace(state, executors=())).start == (BOBS, OWN)


def test_while_hutchd_stops_every_lease_is_refused() -> None:
    """Nothing is started or leased; overdue executors are still ended."""
    state = pool(executor("x", "ready"), executor("silent", last_seen=0.0), leases=(CLAUDE, BOBS), stopping=True)

    assert due(state) == PoolPlan(retire=(Retirement("silent", "it was silent for 60 s"),), refuse=(1, 2))
