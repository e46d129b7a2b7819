"""A turn that waits for a permission has a state of its own for readers; clients before that state see `running`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from hutch_daemon.api.gate import Role
from hutch_daemon.api.older_clients import without_waiting_state
from hutch_daemon.services.states import TURN, shown_state
from hutch_shared import messages as m
from hutch_shared.rpc.peer import Peer
from tests.daemon.api.callers import UID, client_side, dialled, play
from tests.fakes.stage import Stage, new_stage


async def shown(peer: Peer[None], session: str, turn: str) -> list[Any]:
    """Return the turn's state in every result that has one."""
    one: m.Session = await peer.call("get_session", m.SessionRef(session))
    listed: m.Sessions = await peer.call("list_sessions", m.ListSessions(all_owners=True))
    got: m.Turn = await peer.call("get_turn", m.TurnRef(turn))
    turns: m.Turns = await peer.call("list_turns", m.ListTurns(session))
    return [one.active_state, listed.sessions[0].active_state, got.state, turns.turns[0].state]


async def test_a_waiting_turn_is_shown_in_its_own_state(tmp_path: Path) -> None:
    """In every result, to clients that know the state; to others the turn runs, and its flag says that it waits."""
    async with new_stage(tmp_path) as stage, stage.hutchd():
        stage.host.play = play
        session, turn = await waiting(stage)
        side = client_side(stage, lambda _: True)
        async with dialled(side, UID[Role.ADMIN]) as new, dialled(side, UID[Role.ADMIN]) as old:
            await new.call("get_version", m.VersionParams(waiting_state=True))
            await old.call("get_version", m.VersionParams())

            assert await shown(new, session, turn) == ["awaiting_permission"] * 4
            assert await shown(old, session, turn) == ["running"] * 4
            seen: m.Turn = await old.call("get_turn", m.TurnRef(turn))
            status: m.Status = await new.call("get_status", m.Nothing())
            assert seen.awaiting_permission
            assert (status.turns_running, status.turns_awaiting_permission) == (1, 1)

        await stage.answer(await stage.pending(), "allow")


async def waiting(stage: Stage) -> tuple[str, str]:
    """Return a session and its turn, which waits for a permission."""
    session = await stage.open()
    turn = await stage.submit(session, "ask")
    await stage.pending()
    return session.id, turn.id


@pytest.mark.parametrize("state", sorted(get_args(m.TurnState)))
def test_only_a_running_turn_waits(state: m.TurnState) -> None:
    """A turn that is being stopped stays `stopping`; one that ended keeps its end."""
    assert shown_state(state, 0) == state
    assert shown_state(state, 1) == ("awaiting_permission" if state == "running" else state)


def test_the_states_of_readers_are_those_of_the_table_and_one_more() -> None:
    """The stored states stay as they are."""
    assert set(get_args(m.ShownTurnState)) == set(get_args(m.TurnState)) | {"awaiting_permission"}
    assert set(TURN.moves) == set(get_args(m.TurnState))


def test_other_results_stay_as_they_are() -> None:
    """Only the state of a turn is replaced."""
    result = m.Version("0.1.0", 1)

    assert without_waiting_state(result) is result
