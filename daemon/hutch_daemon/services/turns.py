"""Turns: submit a prompt, compact or clear a conversation, list and get turns, cancel or interrupt one."""

from __future__ import annotations

from functools import partial

import structlog

from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.services.access import Access, Caller
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.services.states import TURN, shown_state
from hutch_daemon.services.turn_lifecycle import TurnLifecycle, stopped
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, permissions, turns
from hutch_daemon.store.records import Tx, to_message
from hutch_daemon.store.rows import SessionRow, TurnRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.agents import keeps_conversation
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnKind
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.times import now_ms

__all__ = ["TurnService"]

_log = structlog.get_logger(__name__)


class TurnService:
    """The turn methods of the client socket."""

    def __init__(
        self,
        store: Store,
        access: Access,
        tasks: SessionTasks,
        lifecycle: TurnLifecycle,
        known: KnownSecrets,
        settings: SettingsInForce,
    ) -> None:
        """A prompt that contains one of the `known` secrets is refused."""
        self._store = store
        self._access = access
        self._tasks = tasks
        self._lifecycle = lifecycle
        self._known = known
        self._settings = settings

    async def submit_prompt(self, caller: Caller, params: m.SubmitPrompt) -> m.Turn:
        """Queue a prompt, durably. A repeated idempotency key returns the first turn."""
        self._access.require_serving()
        session = await self._access.session(caller, params.session)
        return await self._queue(session, "prompt", params.prompt, key=params.idempotency_key, timeout=params.timeout)

    async def compact_session(self, caller: Caller, params: m.CompactSession) -> m.Turn:
        """Queue a turn that replaces the conversation by a summary, durably; `params.words` say what it must keep.

        `invalid_params` if the agent keeps no conversation. A repeated idempotency key returns the first turn.
        """
        self._access.require_serving()
        session = await self._access.session(caller, params.session)
        _require_conversation(session, "compact")
        return await self._queue(
            session, "compact", params.words.strip(), key=params.idempotency_key, timeout=params.timeout
        )

    async def clear_session(self, caller: Caller, params: m.ClearSession) -> m.Turn:
        """Queue a turn that begins an empty conversation, durably. Errors as in `compact_session`."""
        self._access.require_serving()
        session = await self._access.session(caller, params.session)
        _require_conversation(session, "clear")
        return await self._queue(session, "clear", "", key=params.idempotency_key)

    async def _queue(
        self, session: SessionRow, kind: TurnKind, words: str, *, key: str | None, timeout: float | None = None
    ) -> m.Turn:
        """Queue a turn, durably, and wake the session's task."""
        limits, prompt = self._settings.current.turns, words.encode()
        if len(prompt) > limits.prompt:
            raise HutchError(Reason.INVALID_PARAMS, f"The prompt is longer than {limits.prompt} bytes.")
        if self._known.find(prompt) is not None:
            raise HutchError(Reason.INVALID_PARAMS, "The prompt holds one of your stored keys; take it out.")
        turn = TurnRow(
            id=new_id("turn"),
            session=session.id,
            prompt=words,
            queued_at=now_ms(),
            idempotency_key=key,
            timeout=timeout,
            kind=kind,
        )

        def queue(tx: Tx) -> TurnRow:
            kept, fresh = turns.insert(tx, turn)
            if fresh and turns.queued(tx, session.id) > limits.queued_per_session:
                raise HutchError(
                    Reason.OVERLOADED, f"{limits.queued_per_session} prompts wait in this session already."
                )
            if kept.state not in TURN.terminal:
                tx.after_commit(partial(self._tasks.start, session.id, session.owner))
            failpoint("turn.queued")
            return kept

        kept = await self._store.write(queue)
        failpoint("turn.stored")
        return _turn_view(kept)

    async def list_turns(self, caller: Caller, params: m.ListTurns) -> m.Turns:
        """List a session's turns."""
        session = await self._access.session(caller, params.session)
        found, more = await self._store.read(lambda conn: turns.page(conn, session.id, params.limit))
        return m.Turns(tuple([await self._view(turn) for turn in found]), more)

    async def get_turn(self, caller: Caller, params: m.TurnRef) -> m.Turn:
        """Return one turn."""
        return await self._view((await self._access.turn(caller, params.turn))[1])

    async def cancel_turn(self, caller: Caller, params: m.TurnRef) -> m.Turn:
        """Remove a turn from the queue; `wrong_state` if it is not queued any more."""
        session, turn = await self._access.turn(caller, params.turn)

        def cancel(tx: Tx) -> None:
            now = turns.get(tx, turn.id)
            if now is None or now.state != "queued":
                raise HutchError(Reason.WRONG_STATE, "The turn is not queued any more; interrupt it.")
            self._lifecycle.end(tx, now, stopped("interrupted", "It had not begun."))
            self._record(tx, caller, session, "cancel_turn", "stopped", turn.id)
            tx.after_commit(partial(self._tasks.wake, session.id))

        await self._store.write(cancel)
        return await self.get_turn(caller, params)

    async def interrupt_turn(self, caller: Caller, params: m.InterruptTurn) -> m.Turn:
        """Stop the running turn. After the reply it starts nothing more; its end may follow a moment later.

        This also works while the store cannot be written: then the log names the caller, and the end is stored later.
        """
        session = await self._access.session(caller, params.session)
        found = await self._store.read(
            lambda conn: turns.active(conn, session.id) or turns.next_queued(conn, session.id)
        )
        if found is None or (params.turn is not None and params.turn != found.id):
            raise HutchError(Reason.WRONG_STATE, "No such turn is running.")
        turn, ref = found, m.TurnRef(found.id)
        try:
            await self._store.write(lambda tx: self._record(tx, caller, session, "interrupt_turn", "asked", ref.turn))
        except HutchError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE:
                raise
            _log.error("an interrupt is not in the audit", by=str(caller), turn=ref.turn, error=error.message)
        while turn.state not in TURN.terminal:
            task = self._tasks.start(session.id, session.owner)
            turned = task.turned
            halted = task.request_stop(turn.id, "interrupted")
            if halted is not None:
                await halted.wait()
                break
            if turn.state == "queued":
                try:
                    return await self.cancel_turn(caller, ref)
                except HutchError as error:
                    if error.reason is not Reason.WRONG_STATE:
                        raise  # `wrong_state`: the turn has just begun; the next round interrupts it
            turn = (await self._access.turn(caller, turn.id))[1]
            if turn.state not in TURN.terminal:
                await turned.wait()
        return await self.get_turn(caller, ref)

    async def _view(self, turn: TurnRow) -> m.Turn:
        if turn.state in TURN.terminal:
            return _turn_view(turn)
        asked = await self._store.read(lambda conn: permissions.list_(conn, turn=turn.id))
        return _turn_view(turn, len(asked))

    @staticmethod
    def _record(tx: Tx, caller: Caller, session: SessionRow, action: str, outcome: str, turn: str) -> None:
        audit.record(
            tx,
            actor=str(caller),
            owner=session.owner,
            action=action,
            outcome=outcome,
            session=session.id,
            subject=turn,
        )


def _require_conversation(session: SessionRow, verb: str) -> None:
    """Raise `invalid_params` if the session's agent keeps no conversation."""
    if not keeps_conversation(session.agent):
        sentence = f"{session.name} has no conversation to {verb}: its agent, {session.agent}, keeps none."
        raise HutchError(Reason.INVALID_PARAMS, sentence)


def _turn_view(row: TurnRow, pending: int = 0) -> m.Turn:
    """Return a turn as clients see it. `pending` is the number of its pending permission requests."""
    return to_message(m.Turn, row, state=shown_state(row.state, pending), awaiting_permission=pending > 0)
