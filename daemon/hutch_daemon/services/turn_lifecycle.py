"""Begins and ends turns: state, event, usage and withdrawn permission requests change in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.services.states import TURN
from hutch_daemon.store import events, sessions, turns, usage
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import TurnRow, UsageRow
from hutch_shared.errors import Reason
from hutch_shared.events import TurnEnded
from hutch_shared.failpoints import failpoint
from hutch_shared.messages import TurnState
from hutch_shared.times import now_ms

__all__ = [
    "StopCause",
    "TurnLifecycle",
    "lost",
    "outcome_unknown",
    "over_limit",
    "settled_state",
    "stopped",
]

StopCause = Literal["interrupted", "timed_out", "closed"]


@dataclass(frozen=True, slots=True)
class TurnLifecycle:
    """The changes of a turn's state, with their events."""

    approvals: Approvals

    def dispatch(self, tx: Tx, turn: TurnRow, executor: str) -> None:
        """Record that an executor gets a queued turn."""
        turns.move(tx, turn.id, TURN.before["dispatching"], "dispatching", executor=executor)

    def begin(self, tx: Tx, turn: TurnRow) -> None:
        """Move a turn from dispatching to running, if it is dispatching. The executor reports `turn_started` itself."""
        turns.move(tx, turn.id, TURN.before["running"], "running", started_at=now_ms())

    def begin_stopping(self, tx: Tx, turn: TurnRow) -> None:
        """Move a running turn to stopping, and withdraw its permission requests."""
        if turns.move(tx, turn.id, {"running"}, "stopping"):
            self.approvals.withdraw(tx, turn.id, "the turn is being stopped")

    def requeue(self, tx: Tx, turn: TurnRow) -> None:
        """Queue a turn again if its executor never accepted it."""
        turns.move(tx, turn.id, {"dispatching"}, "queued", executor=None)

    def offer(self, tx: Tx, turn: TurnRow) -> None:
        """Queue a turn again if its executor is gone and may have accepted it."""
        turns.move(tx, turn.id, {"dispatching"}, "queued", executor=None, offered_to=turn.executor)

    def take_back(self, tx: Tx, turn: TurnRow) -> None:
        """Return a queued turn to the executor that it was offered to: its events show that it had accepted it."""
        if turns.move(tx, turn.id, {"queued"}, "dispatching", executor=turn.offered_to):
            self.begin(tx, turn)

    def end(self, tx: Tx, turn: TurnRow, ended: TurnEnded, *, reported: bool = False) -> bool:
        """End a turn and withdraw its permission requests. Return False if it had already ended.

        The event is appended here, unless the executor `reported` it: then the caller stores it in this transaction.
        """
        state = settled_state(turn.state, ended)
        moved = turns.move(
            tx,
            turn.id,
            TURN.before[state] & {turn.state},
            state,
            ended_at=now_ms(),
            reason=ended.reason,
            message=ended.message,
            result=ended.result,
            usage=ended.usage,
        )
        if not moved:
            return False
        self.approvals.withdraw(tx, turn.id, "the turn ended")
        if not reported:
            events.append(tx, turn.session, turn.id, "turn_ended", ended)
        if turn.kind == "clear" and state == "completed":
            sessions.update(tx, turn.session, agent_session=None, recap_due=False)
        elif not ended.conversation_kept:
            sessions.update(tx, turn.session, agent_session=None, recap_due=True)
        elif ended.agent_session is not None:
            sessions.update(tx, turn.session, agent_session=ended.agent_session, recap_due=False)
        if ended.usage is not None:
            _book(tx, turn, ended)
        failpoint("turn.end")
        return True


def settled_state(state: TurnState, ended: TurnEnded) -> TurnState:
    """Return the terminal state of a turn with this end. A turn that fails while it is being stopped is `stopped`."""
    return ended.state if ended.state in TURN.moves[state] else "stopped"


def _book(tx: Tx, turn: TurnRow, ended: TurnEnded) -> None:
    """Add the turn's usage to the table of usage."""
    session, seen = sessions.get(tx, turn.session), ended.usage
    assert session is not None, "a turn cannot outlive its session"
    assert seen is not None
    usage.add(
        tx,
        UsageRow(
            at=now_ms(),
            owner=session.owner,
            account=session.account,
            session=session.id,
            turn=turn.id,
            model=seen.model or session.options.model or session.agent,
            request=turn.id,
            input_tokens=seen.input_tokens,
            output_tokens=seen.output_tokens,
            cache_read_tokens=seen.cache_read_tokens,
            cache_write_tokens=seen.cache_write_tokens,
            usd=seen.usd,
            why_unknown="The agent reports no price." if seen.usd is None else None,
        ),
    )


def stopped(why: StopCause, detail: str = "", *, verified: bool = True) -> TurnEnded:
    """Return the end of a turn that hutchd stopped. Unless it is `verified` that its processes are gone, the reason is
    `not_verified`, and `detail` says what may be left."""
    texts = {
        "interrupted": "The turn was interrupted.",
        "timed_out": "The turn exceeded its time limit.",
        "closed": "The session was closed.",
    }
    message = f"{texts[why]} {detail}".strip()
    state: Literal["timed_out", "stopped"] = "timed_out" if why == "timed_out" else "stopped"
    return TurnEnded(state=state, reason=why if verified else "not_verified", message=message)


def lost(detail: str) -> TurnEnded:
    """Return the end of a turn whose executor went away while it ran."""
    return TurnEnded(
        "failed",
        Reason.EXECUTOR_LOST.word,
        f"The executor went away before the turn ended: {detail}. What it did until then is in the log; the prompt was"
        " not run again. The next prompt goes on from the conversation.",
    )


def over_limit(detail: str) -> TurnEnded:
    """Return the end of a turn whose process the kernel ended because of a limit; `detail` names the limit."""
    return TurnEnded("failed", "over_limit", f"{detail} The next prompt goes on from the conversation.")


def outcome_unknown(detail: str) -> TurnEnded:
    """Return the end of a turn whose progress cannot be known."""
    return TurnEnded(
        "failed",
        "outcome_unknown",
        f"The outcome of the turn is not known: {detail}. The prompt was not run again, because it may have run.",
    )
