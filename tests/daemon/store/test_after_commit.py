"""The effects of a commit: they run once, in order, and only if the commit is durable."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog.testing

from hutch_daemon.store import events, meta
from hutch_daemon.store.records import Tx
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice
from tests.daemon.store.examples import with_session


class Steps:
    """Records the order of events."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def unit(self, name: str, *, error: Exception | None = None) -> partial[None]:
        """Return a unit that stores `name`, appends an event of that turn and registers an effect, then may raise."""
        return partial(self._unit, name=name, error=error)

    def _unit(self, tx: Tx, name: str, error: Exception | None) -> None:
        meta.put(tx, name, "x")
        events.append(tx, "s-aaaa", name, "notice", Notice("word", "Said."))
        tx.after_commit(partial(self.seen.append, f"effect {name}"))
        if error is not None:
            raise error

    def watch(self, store: Store) -> None:
        store.on_committed(lambda batch: self.seen.extend(f"event {event.turn}" for event in batch))


@pytest.fixture
async def opened(store: Store) -> Store:
    await with_session(store)
    return store


@pytest.fixture
def steps(opened: Store) -> Steps:
    noted = Steps()
    noted.watch(opened)
    return noted


async def healed(store: Store) -> None:
    with anyio.fail_after(30):
        while not store.available:
            await anyio.sleep(0.01)


async def test_effects_follow_the_events_and_precede_the_writers_return(opened: Store, steps: Steps) -> None:
    """When an effect wakes a task, the events are already published; when `write` returns, the effects have run."""
    await opened.write(steps.unit("a"))
    steps.seen.append("returned a")

    assert steps.seen == ["event a", "effect a", "returned a"]


async def test_effects_run_in_the_order_of_their_registration(opened: Store, steps: Steps) -> None:
    """Units that share a commit share this order."""
    gate = threading.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.write, lambda _: gate.wait(10))
        await anyio.wait_all_tasks_blocked()
        for name in ("a", "b", "c"):
            tasks.start_soon(opened.write, steps.unit(name))
        await anyio.wait_all_tasks_blocked()
        gate.set()

    assert [step for step in steps.seen if step.startswith("effect")] == ["effect a", "effect b", "effect c"]


async def test_the_effect_of_a_cancelled_caller_runs(opened: Store, steps: Steps) -> None:
    """An accepted unit is carried out, and so are its effects."""
    started, gate = threading.Event(), threading.Event()

    def unit(tx: Tx) -> None:
        started.set()
        gate.wait(10)
        steps.unit("a")(tx)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.write, unit)
        await anyio.to_thread.run_sync(started.wait)
        tasks.cancel_scope.cancel()
    gate.set()
    await opened.write(lambda tx: None)

    assert steps.seen == ["event a", "effect a"]


async def test_a_unit_that_raises_has_no_effects(opened: Store, steps: Steps) -> None:
    """Its effects are dropped with the unit; those of other units in the same commit run."""
    gate = threading.Event()
    raised: list[Exception] = []

    async def failing() -> None:
        with pytest.raises(LookupError) as caught:
            await opened.write(steps.unit("bad", error=LookupError("mine")))
        raised.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(opened.write, lambda _: gate.wait(10))
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(opened.write, steps.unit("a"))
        tasks.start_soon(failing)
        tasks.start_soon(opened.write, steps.unit("b"))
        await anyio.wait_all_tasks_blocked()
        gate.set()

    assert [step for step in steps.seen if step.startswith("effect")] == ["effect a", "effect b"]
    assert len(raised) == 1


async def test_a_failed_commit_has_no_effects(opened: Store, steps: Steps) -> None:
    """A refused unit has no effects, not even after the store has recovered."""
    with closing(sqlite3.connect(opened.path, isolation_level=None)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        with pytest.raises(HutchError) as caught:
            await opened.write(steps.unit("a"))
    await healed(opened)
    await opened.write(steps.unit("b"))

    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert steps.seen == ["event b", "effect b"]


async def test_a_commit_that_was_refused_but_stored_has_its_effects_when_it_is_found(
    opened: Store, steps: Steps
) -> None:
    """A failed sync can leave a whole commit in the log: its events are published after healing, its effects follow."""

    def unit(tx: Tx) -> None:
        steps.unit("a")(tx)
        tx.execute("COMMIT")  # the bytes reach the disk; the writer learns only of the error that follows

    with pytest.raises(HutchError):
        await opened.write(unit)
    refused = list(steps.seen)
    await healed(opened)
    await opened.write(steps.unit("b"))

    assert refused == []
    assert steps.seen == ["event a", "effect a", "event b", "effect b"]


async def test_a_commit_that_is_not_found_after_a_failed_sync_has_no_effects(opened: Store, steps: Steps) -> None:
    """The store reopens the database, does not find the refused unit, and drops its effects."""

    def unit(tx: Tx) -> None:
        steps.unit("a")(tx)
        tx.execute("ROLLBACK")

    with pytest.raises(HutchError):
        await opened.write(unit)
    await healed(opened)
    await opened.write(steps.unit("b"))

    assert steps.seen == ["event b", "effect b"]


async def test_effects_run_while_the_store_closes(tmp_path: Path) -> None:
    """Accepted units are committed, and their effects have run when the store is closed."""
    steps = Steps()
    async with anyio.create_task_group() as tasks:
        async with Store.open(tmp_path / "hutch.db") as store:
            await with_session(store)
            for number in range(20):
                tasks.start_soon(store.write, steps.unit(f"{number}"))
            await anyio.wait_all_tasks_blocked()
        done = list(steps.seen)

    assert done == [f"effect {number}" for number in range(20)]


async def test_an_effect_that_raises_is_logged_and_harms_no_other(opened: Store, steps: Steps) -> None:
    """The other effects run, and the writer gets its result."""

    def unit(tx: Tx) -> str:
        tx.after_commit(lambda: 1 / 0)
        steps.unit("a")(tx)
        return "done"

    with structlog.testing.capture_logs() as logged:
        result = await opened.write(unit)

    assert result == "done"
    assert steps.seen == ["event a", "effect a"]
    assert [line["event"] for line in logged] == ["effect_failed"]
