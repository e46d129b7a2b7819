"""Stores the events that executors report, in order, acknowledges them, and checks that they may report them.

A `turn_ended` event and the turn's terminal state are stored in one transaction. An event that an executor may not
report (such as `permission_settled`), or reports too late (the end of a turn that hutchd ended before), is replaced by
a `notice` with the same number, so that the executor's numbers have no gap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import UNSET, Raw

from hutch_daemon.pool.executors import Executor
from hutch_daemon.services.masking import Masking
from hutch_daemon.services.turn_lifecycle import TurnLifecycle
from hutch_daemon.store import events, executors, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import ExecutorRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, ReportedEvent, TurnEnded
from hutch_shared.failpoints import failpoint

__all__ = ["ReportService"]

_OURS: Final = frozenset({"permission_asked", "permission_settled"})
_ended_of = msgspec.json.Decoder(TurnEnded).decode
_encode = msgspec.json.encode
_MayReport = Callable[[Tx, ExecutorRow, str], bool]
"""Returns whether an executor may report events of a session."""


class ReportService:
    """The method of the executor socket that stores events in the journal."""

    def __init__(
        self,
        store: Store,
        lifecycle: TurnLifecycle,
        on_ended: Callable[[str], None],
        masking: Masking,
        before_end: Callable[[str, str], Awaitable[None]],
        on_end: Callable[[str, TurnEnded], None],
    ) -> None:
        """`before_end(session, turn)` is called before the end of a turn is stored; `on_ended(session)` after a commit
        that ends a turn or takes one out of the queue. Secrets are masked before the commit.

        `on_end(executor, end)` is called after a commit that ends a turn as its executor reported.
        """
        self._store = store
        self._lifecycle = lifecycle
        self._on_ended = on_ended
        self._masking = masking
        self._before_end = before_end
        self._on_end = on_end

    async def report_message(self, executor: Executor, params: m.ReportMessage) -> None:
        """Store a batch; then acknowledge all events of this executor up to the number that is durable.

        `lease_lost` if it does not serve the session; `invalid_request` for a gap in its numbers.
        """
        failpoint("report.came")
        if executor.session != params.session:
            raise HutchError(Reason.LEASE_LOST)
        for event in params.events:
            if event.kind == "turn_ended" and event.turn is not None:
                await self._before_end(params.session, event.turn)
        acked = await self._store_batch(executor.id, params.session, params.events, _leased)
        failpoint("report.committed")
        failpoint("report.ack")
        if executor.peer is not None:
            await executor.peer.notify("ack_events", m.AckEvents(acked))

    async def take_left(self, executor: str, left: m.SpooledEvents) -> int:
        """Store events from the spool of an executor that is gone; return the number up to which they are durable.

        `lease_lost` if it cannot have served the session, `not_found` if the session was removed; `invalid_request` for
        a gap in its numbers.
        """
        return await self._store_batch(executor, left.session, left.events, _may_have_served)

    async def _store_batch(self, executor: str, session: str, batch: Sequence[ReportedEvent], may: _MayReport) -> int:
        clean, hits = self._masking.clean(session, batch) if self._masking.known else (batch, [])

        def keep(tx: Tx) -> int:
            if hits:
                self._masking.record(tx, session, hits)
            return self._keep(tx, executor, session, clean, may)

        return await self._store.write(keep)

    def _keep(self, tx: Tx, executor: str, session: str, batch: Sequence[ReportedEvent], may: _MayReport) -> int:
        row = executors.get(tx, executor)
        if row is None or not may(tx, row, session):
            raise HutchError(Reason.LEASE_LOST)
        fresh = [event for event in batch if event.n > row.acked_n]
        kept: list[ReportedEvent] = []
        known: dict[str | None, bool] = {None: True}
        for event in fresh:
            if event.turn not in known:
                turn = turns.get(tx, event.turn or "")
                if turn is not None and (turn.state, turn.offered_to) == ("queued", executor):
                    self._lifecycle.take_back(tx, turn)
                    turn = turns.get(tx, turn.id)
                    tx.after_commit(partial(self._on_ended, session))
                known[event.turn] = (
                    turn is not None and turn.session == session and executor in (turn.executor, turn.offered_to)
                )
                if turn is not None and executor == turn.executor and turn.state == "dispatching":
                    self._lifecycle.begin(tx, turn)  # this event arrived before the reply to `execute_prompt`
            if not known[event.turn]:
                sentence = f"The executor reported a {event.kind} of a turn that it was not given."
                kept.append(msgspec.structs.replace(_noticed(event, "no_such_turn", sentence), turn=None))
            elif event.kind in _OURS:
                kept.append(
                    _noticed(event, "not_yours", f"The executor reported a {event.kind}, which only hutchd may report.")
                )
            elif event.kind == "turn_ended":
                kept.append(self._end(tx, executor, event))
                tx.after_commit(partial(self._on_ended, session))
            else:
                kept.append(event)
        _, acked = events.append_reported(tx, executor, session, kept)
        return acked

    def _end(self, tx: Tx, executor: str, event: ReportedEvent) -> ReportedEvent:
        try:
            ended = _ended_of(event.data)
        except msgspec.DecodeError:
            ended = TurnEnded("failed", "malformed", "The executor reported the end of the turn in an unreadable form.")
            event = msgspec.structs.replace(event, data=Raw(_encode(ended)))
        turn = turns.get(tx, event.turn) if event.turn is not None else None
        if turn is None:
            return _noticed(event, "no_such_turn", "The executor reported an end without a turn.")
        if turn.executor != executor:
            sentence = f"The executor reported the turn as {ended.state}; it had been given to another one."
            return _noticed(event, "ended_before", sentence)
        if not self._lifecycle.end(tx, turn, ended, reported=True):
            return _noticed(
                event, "ended_before", f"The executor reported the turn as {ended.state}; it had already ended."
            )
        tx.after_commit(partial(self._on_end, executor, ended))
        settled = turns.get(tx, turn.id)
        if settled is not None and settled.state != ended.state:  # a turn that failed during its stop counts as stopped
            corrected = msgspec.structs.replace(ended, state=settled.state)
            event = msgspec.structs.replace(event, data=Raw(_encode(corrected)))
        return event


def _leased(_: Tx, row: ExecutorRow, session: str) -> bool:
    return row.session == session


def _may_have_served(tx: Tx, row: ExecutorRow, session: str) -> bool:
    """Return whether an executor without a lease may have served the session: it is gone and has the same account."""
    served = sessions.get(tx, session)
    if served is None:
        raise HutchError(Reason.NOT_FOUND)
    return row.state == "gone" and served.account == row.account


def _noticed(event: ReportedEvent, word: str, message: str) -> ReportedEvent:
    """Return a notice with the number of `event`."""
    return msgspec.structs.replace(event, kind="notice", data=Raw(_encode(Notice(word, message))), native=UNSET)
