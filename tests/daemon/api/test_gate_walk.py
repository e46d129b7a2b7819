"""Every cell of the table of clients, through real connections to real services and their store.

A cell is a method, the caller's role, whether hutchd drains, the call's subject, its ownership and its session's
state. The test calls each cell once and compares the reply with the table. CI calls the cells of two roles for each
method, which a seed chooses.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import anyio
import msgspec
import pytest

from hutch_daemon.api.gate import CLIENT_GATE, Ownership, Phase, Role, Subject, expected
from hutch_daemon.settings import ExecutorSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import CLIENT
from hutch_shared.rpc.peer import Peer
from tests import sampling
from tests.daemon.api.callers import BOB, UID, Things, absent, at_work, client_side, dialled, everybody, play
from tests.fakes.stage import new_stage, settings, until

NAMED: Final = (Subject.SESSION, Subject.TURN, Subject.QUESTION, Subject.KEY)
ALL: Final = (Subject.SEEN, Subject.OWN)
CASE: Final = json.dumps({"id": "c", "tool": "Bash", "input": {"command": "rm x"}, "want": "ask"})

CALLS: Final[Mapping[str, Callable[[Things, bool], msgspec.Struct]]] = {
    # the parameters of each method for these records; with `every`, for all records that it can name
    "ping": lambda it, every: m.Nothing(),
    "get_version": lambda it, every: m.VersionParams(m.PROTOCOL, "test"),
    "get_status": lambda it, every: m.Nothing(),
    "open_session": lambda it, every: m.OpenSession("script", "/project/opened"),
    "compact_session": lambda it, every: m.CompactSession(it.session, "the tests"),
    "clear_session": lambda it, every: m.ClearSession(it.session),
    "submit_prompt": lambda it, every: m.SubmitPrompt(it.session, "talk"),
    "list_sessions": lambda it, every: m.ListSessions(all_owners=True, limit=10_000),
    "get_session": lambda it, every: m.SessionRef(it.session),
    "list_turns": lambda it, every: m.ListTurns(it.session),
    "get_turn": lambda it, every: m.TurnRef(it.turn),
    "follow_events": lambda it, every: m.FollowEvents("*" if every else it.session, answers=True),
    "unfollow": lambda it, every: m.Unfollow(1_000),
    "read_events": lambda it, every: m.ReadEvents("*" if every else it.session, limit=10_000),
    "list_permissions": lambda it, every: m.ListPermissions(None if every else it.session, None, limit=10_000),
    "answer_permission": lambda it, every: m.AnswerPermission(it.question, "deny"),
    "interrupt_turn": lambda it, every: m.InterruptTurn(it.session),
    "cancel_turn": lambda it, every: m.TurnRef(it.turn),
    "close_session": lambda it, every: m.CloseSession(it.session, force=True),
    "delete_session": lambda it, every: m.SessionRef(it.session),
    "fork_session": lambda it, every: m.ForkSession(it.session),
    "put_api_key": lambda it, every: m.PutApiKey("anthropic", "sk-ant-api03-of-a-cell-of-the-table", "of-a-cell"),
    "list_api_keys": lambda it, every: m.Nothing(),
    "delete_api_key": lambda it, every: m.DeleteApiKey("anthropic", it.key),
    "use_api_key": lambda it, every: m.UseApiKey("anthropic", it.key),
    "explain_key": lambda it, every: m.ExplainKey(None if every else it.session, "anthropic"),
    "rotate_master_key": lambda it, every: m.Nothing(),
    "get_usage": lambda it, every: m.GetUsage(None if every else it.session),
    "show_policy": lambda it, every: m.ShowPolicy(None if every else it.session),
    "explain_policy": lambda it, every: m.ExplainPolicy("Bash", {"command": "make"}, None if every else it.session),
    "test_policy": lambda it, every: m.TestPolicy(CASE),
    "change_rules": lambda it, every: m.ChangeRules(add=m.Rules(deny=("Bash(rm:*)",))),
    "trust_policy": lambda it, every: m.TrustPolicy("/project/policy.toml", "0" * 64),
    "set_permission_mode": lambda it, every: m.SetPermissionMode(it.session, "plan"),
    "read_audit": lambda it, every: m.ReadAudit(None if every else it.session, limit=10_000),
    "stop_daemon": lambda it, every: m.StopDaemon("leave"),
    "backup_store": lambda it, every: m.BackupStore(f"/nowhere/{it.session}"),
}
SHOWN: Final = ("list_sessions", "read_events", "list_permissions", "read_audit", "get_usage")
"""The methods that show administrators the records of all users."""


USING_UP: Final = (
    "answer_permission",
    "cancel_turn",
    "close_session",
    "delete_api_key",
    "delete_session",
    "interrupt_turn",
    "stop_daemon",
)


class Cell(NamedTuple):
    """One cell of the table."""

    method: str
    role: Role
    phase: Phase
    about: Subject
    whose: Ownership = Ownership.OWN
    session: m.SessionState = "open"

    @property
    def expected(self) -> Reason | None:
        return expected(*self)

    @property
    def uses_up(self) -> bool:
        """Whether the call changes its records, so that no other call can use them."""
        return self.method in USING_UP and self.expected is None

    @property
    def unseen(self) -> bool:
        """Whether the caller may not see the subject of the call."""
        sees = self.role in (Role.ROOT, Role.ADMIN) and self.about is not Subject.KEY
        return self.about in NAMED and (
            self.whose is Ownership.MISSING or (self.whose is Ownership.FOREIGN and not sees)
        )


def cells() -> Iterable[Cell]:
    """Yield every cell of the table."""
    for method, row in CLIENT_GATE.items():
        for role in Role:
            for phase in Phase:
                for about in row.about:
                    if about not in NAMED:
                        yield Cell(method, role, phase, about)
                        continue
                    for whose in Ownership:
                        states: tuple[m.SessionState, ...] = ("open", "closed")
                        if about is Subject.KEY or whose is Ownership.MISSING:
                            states = ("open",)
                        for state in states:
                            yield Cell(method, role, phase, about, whose, state)


def cells_of_roles(count: int) -> list[Cell]:
    """Return the cells of `count` roles for each method, which the run's seed chooses."""
    chance = Random(f"{sampling.seed()} {__name__}")
    roles = {method: chance.sample(list(Role), count) for method in CLIENT_GATE}
    return [cell for cell in cells() if cell.role in roles[cell.method]]


def params_of(cell: Cell, it: Things, folder: Path) -> msgspec.Struct:
    """Return the parameters of the cell's call."""
    if cell.method == "backup_store":
        return m.BackupStore(str(folder / f"copy-{absent().session}"))
    if (cell.method, cell.about) == ("list_permissions", Subject.QUESTION):
        return m.ListPermissions(state=None, after=it.question)
    return CALLS[cell.method](it, cell.about in ALL)


class Walk:
    """The results of all cells against one hutchd."""

    def __init__(self) -> None:
        self.done: Counter[Cell] = Counter()
        self.wrong: list[str] = []
        self.told: dict[tuple[Any, ...], set[str]] = {}
        """The replies to callers about records that they may not see, without the names that the call contained."""

    async def step(self, cell: Cell, peer: Peer[None], it: Things, folder: Path, foreign: tuple[str, ...]) -> None:
        """Make one call and compare its result. `foreign` holds the ids of Bob's records."""
        said = "allowed"
        try:
            answer = msgspec.json.encode(await peer.call(cell.method, params_of(cell, it, folder), 30.0)).decode()
        except HutchError as error:
            said = error.reason.word
            answer = repr((error, error.details))
        for name in it.ids:
            answer = answer.replace(name, "THAT") if said != "allowed" else answer
        if cell.unseen:
            self.told.setdefault((cell.method, cell.role, cell.phase, cell.about), set()).add(answer)
        want = cell.expected.word if cell.expected is not None else "allowed"
        if said != want:
            self.wrong.append(f"{cell}: {said}, not {want}: {answer}")
        self._look(cell, answer, foreign)
        self.done[cell] += 1

    def _look(self, cell: Cell, answer: str, foreign: tuple[str, ...]) -> None:
        """Check that the reply shows only those of Bob's records that the caller may see."""
        sees = cell.role in (Role.ROOT, Role.ADMIN)
        shown = [name for name in foreign if name in answer]
        everybodys = (
            cell.about is Subject.SEEN or cell.method == "list_permissions"
        )  # the walk starts with its permission request
        if shown and not (sees and (everybodys or cell.whose is Ownership.FOREIGN)):
            self.wrong.append(f"{cell}: shows {shown}")
        if not shown and sees and cell.about is Subject.SEEN and cell.method in SHOWN:
            self.wrong.append(f"{cell}: does not show what is another's")


async def walk(folder: Path, which: Iterable[Cell], phase: Phase, into: Walk) -> None:
    """Create the records that the cells need, and call every cell."""
    todo = list(which)
    folder.mkdir()
    async with new_stage(folder) as stage:
        stage.settings = settings(executors=ExecutorSettings(spares=0, maximum=10_000))
        stage.host.play = play
        async with stage.hutchd():
            side = client_side(stage)
            async with everybody(side) as (callers, people), dialled(side, BOB) as bob:
                shared: dict[tuple[Role, Ownership, m.SessionState], Things] = {}
                own: dict[Cell, Things] = {}

                async def make(into: dict[Any, Things], key: Any, owner: Peer[None], state: m.SessionState) -> None:
                    into[key] = await at_work(owner, state)

                async with anyio.create_task_group() as tasks:
                    for cell in todo:
                        if cell.uses_up and cell.about in NAMED:
                            owner = bob if cell.whose is Ownership.FOREIGN else people[cell.role]
                            tasks.start_soon(make, own, cell, owner, cell.session)
                async with anyio.create_task_group() as tasks:  # last: their keys are in use then
                    for state in ("open", "closed"):
                        theirs = [(role, Ownership.OWN, people[role]) for role in Role]
                        for role, whose, owner in (*theirs, (Role.PERSON, Ownership.FOREIGN, bob)):
                            tasks.start_soon(make, shared, (role, whose, state), owner, state)
                foreign = (
                    shared[Role.PERSON, Ownership.FOREIGN, "open"].ids
                    + shared[Role.PERSON, Ownership.FOREIGN, "closed"].ids
                )
                if phase is Phase.DRAINING:
                    await people[Role.ROOT].call("stop_daemon", m.StopDaemon("leave"))
                for cell in todo:
                    it = own.get(cell)
                    if cell.whose is Ownership.MISSING:
                        it = absent()
                    elif it is None:
                        role = Role.PERSON if cell.whose is Ownership.FOREIGN else cell.role
                        it = shared[role, cell.whose, cell.session]
                    await into.step(cell, callers[cell.role], it, folder, foreign)


def stops(cell: Cell) -> bool:
    """Return whether hutchd drains after the call."""
    return cell.method == "stop_daemon" and cell.expected is None


@pytest.mark.parametrize(
    "roles", [pytest.param(2, id="two-roles"), pytest.param(len(Role), id="all-roles", marks=pytest.mark.full)]
)
async def test_each_cell_is_as_the_table_says(tmp_path: Path, roles: int) -> None:
    """Every role calls every method about every subject in every state.

    The replies are those of the table, and a foreign record gets the same reply as a missing one.
    """
    seen = Walk()
    called = cells_of_roles(roles)
    serving = [cell for cell in called if cell.phase is Phase.SERVING]
    draining = [cell for cell in called if cell.phase is Phase.DRAINING]

    await walk(tmp_path / "serving", [cell for cell in serving if not stops(cell)], Phase.SERVING, seen)
    for number, cell in enumerate(filter(stops, serving)):  # each of these calls ends its hutchd
        await walk(tmp_path / f"stops-{number}", [cell], Phase.SERVING, seen)
    await walk(tmp_path / "draining", draining, Phase.DRAINING, seen)

    unlike = {where: said for where, said in seen.told.items() if len(said) != 1}
    assert not seen.wrong, "\n".join(seen.wrong)
    assert unlike == {}
    assert seen.done == Counter(called)
    assert roles < len(Role) or called == list(cells())
    print(len(seen.done), "cells")


def test_every_method_has_a_row_and_a_call() -> None:
    """Without a row in the table, a method of the wire would be refused to everybody, so the test fails."""
    assert set(CLIENT_GATE) == set(CLIENT)
    assert set(CALLS) == set(CLIENT)


@pytest.mark.parametrize("uid", [0, UID[Role.ADMIN], UID[Role.HUTCHD]])
async def test_a_process_of_a_session_lacks_the_rights_of_its_account(tmp_path: Path, uid: int) -> None:
    """Under any account, a session's process is an insider: it sees that account's records and operates nothing."""
    async with new_stage(tmp_path) as stage, stage.hutchd():
        side = client_side(stage)
        async with dialled(side, BOB) as bob, dialled(side, uid, insider="x-0000000000000000") as inside:
            await bob.call("open_session", m.OpenSession("script", "/project/bob", name="bobs"))
            seen = await inside.call("list_sessions", m.ListSessions(all_owners=True))
            with pytest.raises(HutchError) as looked:
                await inside.call("get_session", m.SessionRef("bobs"))
            with pytest.raises(HutchError) as stopped:
                await inside.call("stop_daemon", m.StopDaemon())

    assert seen.sessions == ()
    assert (looked.value.reason, stopped.value.reason) == (Reason.NOT_FOUND, Reason.INSIDER)


async def test_a_former_administrator_sees_only_their_own_records(tmp_path: Path) -> None:
    """New settings take effect at the next call, on open connections too."""
    admins = {UID[Role.ADMIN]}
    async with new_stage(tmp_path) as stage, stage.hutchd():
        side = client_side(stage, lambda one: one in admins)
        async with dialled(side, BOB) as bob, dialled(side, UID[Role.ADMIN]) as admin:
            await bob.call("open_session", m.OpenSession("script", "/project/bob", name="bobs"))
            before = await admin.call("list_sessions", m.ListSessions(all_owners=True))
            admins.clear()
            stage.settings = settings()
            after = await admin.call("list_sessions", m.ListSessions(all_owners=True))

    assert [one.name for one in before.sessions] == ["bobs"]
    assert after.sessions == ()


async def test_status_shows_users_their_own_executors(tmp_path: Path) -> None:
    """Each executor is shown to its session's owner, and notices about the host to operators."""
    async with new_stage(tmp_path) as stage, stage.hutchd():
        side = client_side(stage)
        stage.host.refusing, stage.host.play = 100, play
        async with dialled(side, BOB) as bob, everybody(side) as (callers, _):
            await bob.call("open_session", m.OpenSession("script", "/project/bob"))
            await until(lambda: bool(stage.notices.all()))
            stage.host.refusing = 0
            at_work_there = await at_work(callers[Role.PERSON])
            seen = {role: await peer.call("get_status", m.Nothing()) for role, peer in callers.items()}
            bobs = await bob.call("get_status", m.Nothing())

    assert [one.session for one in seen[Role.PERSON].executors] == [at_work_there.session]
    assert [one.session for one in seen[Role.ADMIN].executors] == [at_work_there.session]
    assert (bobs.executors, bobs.notices, bobs.sessions_open) == ((), (), 1)
    assert {role for role, status in seen.items() if status.notices} >= {Role.ROOT, Role.ADMIN}
    assert seen[Role.PERSON].notices == seen[Role.INSIDER].notices == ()
