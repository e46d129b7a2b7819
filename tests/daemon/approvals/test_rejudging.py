"""A pending request is judged again when the policy changes: nobody is asked about a call that is decided."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import anyio
import msgspec
import pytest

from hutch_daemon.permissions.requests import Settlement
from hutch_daemon.store import permissions
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import PermissionSettled, TurnEnded
from hutch_shared.vocabulary import to_call
from tests.daemon.approvals.test_approvals import Asks, command
from tests.daemon.services.test_bad_disk import nothing_stored
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import Stage, until
from tests.sampling import seed

QUESTION = m.ToolCall("c-1", "question", "AskUserQuestion", {"questions": [{"question": "Which?"}]})
PLAN = m.ToolCall("c-1", "plan", "ExitPlanMode", {"plan": "# Do"})
EDIT = to_call("Edit", {"file_path": "/proj/a", "old_string": "a", "new_string": "b"}, "c-1", "/proj")


async def judged_again(stage: Stage) -> None:
    """Wait until every pending request was judged by the policy in force."""
    await until(stage.services.approvals.approvals.look_at_host)


async def set_mode(stage: Stage, session: m.Session, mode: m.PermissionMode) -> None:
    await stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(session.id, mode))


async def change_rules(stage: Stage, **changes: Any) -> None:
    await stage.services.policy.change_rules(stage.me, m.ChangeRules(**changes))


async def request(stage: Stage, permission: str) -> m.Permission:
    """Return a request, pending or settled."""
    page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions(state=None))
    return next(one for one in page.permissions if one.id == permission)


@asynccontextmanager
async def busy_store(stage: Stage) -> AsyncIterator[None]:
    """Let writes wait for the end of the block; reads go on."""
    free, began = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        began.set()
        free.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.store.write, hold)
        await until(began.is_set)
        try:
            yield
        finally:
            free.set()


async def queued(stage: Stage, jobs: int) -> None:
    """Wait until this many writes wait in the store."""
    await until(lambda: stage.store._writer._inbox.qsize() >= jobs)


# ---------------------------------------------------------------- one change of each kind


@pytest.mark.parametrize(
    ("add", "state", "decision"),
    [
        (m.Rules(allow=("Bash(make)",)), "allowed", "allow"),
        (m.Rules(deny=("Bash(make)",)), "denied", "deny"),
    ],
)
async def test_a_new_rule_settles_what_it_decides(stage: Stage, add: m.Rules, state: str, decision: str) -> None:
    """The record, the event and the audit name the rule, and the waiting call goes on."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()

        await change_rules(stage, add=add)
        await stage.ended(turn)

        settled = await request(stage, asked.id)
        events = [event for event in await stage.events(session) if event.kind == "permission_settled"]
        told = msgspec.json.decode(events[0].data, type=PermissionSettled)
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        assert (settled.state, settled.settled_by, settled.settled_rule) == (state, "rule", "Bash(make)")
        assert (told.state, told.by) == (state, "rule")
        assert [(line.outcome, line.actor, line.rule) for line in page.entries] == [(state, "rule", "Bash(make)")]
        assert asks.decided["c-1"].decision == decision


@pytest.mark.parametrize(("mode", "state"), [("bypass", "allowed"), ("unattended", "denied"), ("plan", "pending")])
async def test_a_new_mode_settles_what_it_decides(stage: Stage, mode: m.PermissionMode, state: str) -> None:
    """`settled_by` names the mode; a mode that asks too leaves the request pending."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        await stage.submit(session)
        asked = await stage.pending()

        await set_mode(stage, session, mode)
        await judged_again(stage)

        settled = await request(stage, asked.id)
        assert (settled.state, settled.settled_by) == (state, None if state == "pending" else f"mode {mode}")


async def test_an_approved_plan_settles_what_its_mode_allows(stage: Stage) -> None:
    """The mode that the approval restores is one more change."""
    asks = stage.host.play = _Both((EDIT, "tool"), (msgspec.structs.replace(PLAN, call_id="c-2"), "plan"))
    async with stage.hutchd():
        session = await stage.open(permission_mode="accept_edits")
        await set_mode(stage, session, "plan")
        turn = await stage.submit(session)
        plan = await asks.asked(stage, "plan")

        await stage.answer(plan, "allow")
        await stage.ended(turn)

        assert asks.decided["c-1"].decision == "allow"


class _Both:
    """A play that requests permission for calls of several kinds at once."""

    def __init__(self, *calls: tuple[m.ToolCall, m.PermissionKind]) -> None:
        self.calls = calls
        self.decided: dict[str, m.PermissionDecision] = {}

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        async def one(call: m.ToolCall, kind: m.PermissionKind) -> None:
            questions = (m.Question("Which?"),) if kind == "question" else ()
            self.decided[call.call_id] = await executor.ask(call, kind=kind, questions=questions)

        async with anyio.create_task_group() as tasks:
            for call, kind in self.calls:
                tasks.start_soon(one, call, kind)
        return TurnEnded("completed", "done", "Done.")

    async def asked(self, stage: Stage, kind: m.PermissionKind) -> m.Permission:
        """Wait until all are pending; return the one of this kind."""
        found: list[m.Permission] = []

        async def all_of_them() -> bool:
            page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())
            found[:] = page.permissions
            return len(found) == len(self.calls)

        await until(all_of_them)
        return next(one for one in found if one.kind == kind)


async def test_a_twin_of_an_answered_request_is_settled_with_it(stage: Stage) -> None:
    """A rule that the answer adds, for the session or the project, decides equal calls that already wait."""
    asks = stage.host.play = Asks(*(command("git fetch origin", f"c-{at}") for at in range(20)))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()

        await stage.answer(asked, "allow", scope="session", rule="Bash(git fetch:*)")
        await stage.ended(turn)

        page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions(state=None))
        assert {one.decision for one in asks.decided.values()} == {"allow"}
        assert sorted(one.settled_by or "" for one in page.permissions) == ["rule"] * 19 + [str(stage.me)]


async def test_trust_settles_what_the_projects_file_allows(stage: Stage) -> None:
    """Until then the file's rules that allow do not count."""
    text = '[permissions]\nallow = ["Bash(git fetch:*)"]\n'
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = "/proj/.hutch/policy.toml"
    asks = stage.host.play = Asks(command("git fetch origin"), project=m.ProjectFile(path, digest, text))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        await stage.pending()

        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy(path, digest))
        await stage.ended(turn)

        assert asks.decided["c-1"].decision == "allow"


async def test_a_changed_project_file_settles_what_it_denies(stage: Stage) -> None:
    """The executor sends the file with each call; the earlier calls of its session are judged by it too."""
    text = '[permissions]\ndeny = ["Bash(make:*)"]\n'
    project = m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)
    stage.host.play = Asks(command("make"), go_on=True)
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(rules=m.Rules(allow=("Bash(ls:*)",))))
        asked = await stage.pending()

        await stage.executor.ask(command("ls", "c-2"), turn=turn.id, project=project)
        await judged_again(stage)

        assert (await request(stage, asked.id)).state == "denied"


async def test_a_removed_project_file_allows_nothing_but_still_denies(stage: Stage) -> None:
    """Its trust is for a file that is there. The agent may have removed it, so what it denied stays denied."""
    text = '[permissions]\nallow = ["Bash(make)"]\ndeny = ["Bash(rm:*)"]\n'
    path, digest = "/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest()
    project = m.ProjectFile(path, digest, text)
    stage.host.play = never_end
    async with stage.hutchd():
        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy(path, digest))
        turn = await stage.submit(await stage.open(rules=m.Rules(allow=("Bash(rm:*)",))))
        executor = await stage.running(turn)
        before = await executor.ask(command("make"), turn=turn.id, project=project)
        stage.host.tasks.start_soon(partial(executor.ask, command("make", "c-2"), turn=turn.id))
        asked = await stage.pending()
        removed = await executor.ask(command("rm x", "c-3"), turn=turn.id)
        again = await executor.ask(command("make", "c-4"), turn=turn.id, project=project)
        await judged_again(stage)

        assert (before.decision, removed.decision, again.decision) == ("allow", "deny", "allow")
        assert "removed since" in (removed.message or "")
        assert "No rule allows" in asked.why
        assert (await request(stage, asked.id)).state == "allowed"


async def test_a_call_asked_again_brings_no_older_project_file(stage: Stage) -> None:
    """The executor sends what it read when it asked first; another call has brought a newer file since."""

    def file(text: str) -> m.ProjectFile:
        return m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)

    newer = file('[permissions]\ndeny = ["Bash(rm:*)"]\n')
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(rm:*)", "Bash(ls:*)")))
        for older in (file("[permissions]\n"), None):
            turn, asked, ask = await asked_and_left(stage, session, project=older)
            await stage.executor.ask(command("ls", f"c-2 {older}"), turn=turn.id, project=newer)
            stage.host.tasks.start_soon(
                partial(stage.executor.ask, command("make"), ask=ask, turn=turn.id, project=older)
            )
            await judged_again(stage)
            with pytest.raises(HutchError, match="not allowed"):
                await stage.answer(asked, "allow", updated_input={"command": "rm x"})
            await stage.answer(asked, "deny")
            await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id, turn.id))
            await stage.ended(turn)


@pytest.mark.parametrize(
    ("newer", "state"),
    [('[permissions]\ndeny = ["Edit(**)"]\n', "denied"), (None, "pending")],
    ids=["other", "removed"],
)
async def test_a_call_that_waits_for_its_paths_brings_no_older_project_file(
    stage: Stage, newer: str | None, state: str
) -> None:
    """Another call has brought a newer file meanwhile, or has found that the file is removed: that decides both."""

    def file(text: str) -> m.ProjectFile:
        return m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)

    older = file('[permissions]\nallow = ["Edit(**)"]\n')
    found = None if newer is None else file(newer)
    stage.host.play = never_end
    async with stage.hutchd():
        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy(older.path, older.digest))
        turn = await stage.submit(await stage.open())
        executor = await stage.running(turn)
        async with anyio.create_task_group() as tasks:
            stage.host.slow_paths = anyio.Event()
            tasks.start_soon(partial(executor.ask, EDIT, turn=turn.id, project=older))
            await until(lambda: "resolve_paths" in [name for name, _ in executor.calls])
            listing = to_call("mcp__files__list", {}, "c-2", "/proj")
            tasks.start_soon(partial(executor.ask, listing, turn=turn.id, project=found))
            await stage.pending()
            stage.host.slow_paths.set()

            async def recorded() -> list[str]:
                calls = {one.call.call_id: one.state for one in await all_requests(stage)}
                view = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
                return [calls["c-1"]] if "c-1" in calls else [line.outcome for line in view.entries]

            async def is_recorded() -> bool:
                return bool(await recorded())

            await until(is_recorded)
            tasks.cancel_scope.cancel()

        assert await recorded() == [state]


async def test_a_changed_host_file_settles_what_it_denies(stage: Stage) -> None:
    """No signal is needed: hutchd looks at the file while a request is pending."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        await stage.pending()

        (stage.folder / "policy.toml").write_text('[permissions]\ndeny = ["Bash(make:*)"]\n')
        ended = await stage.ended(turn)

        assert ended.state == "completed"
        assert "policy.toml" in (asks.decided["c-1"].message or "")


@pytest.mark.parametrize(
    ("call", "kind"), [(QUESTION, "question"), (PLAN, "plan"), (command("make"), "question"), (command("make"), "plan")]
)
async def test_questions_and_plans_are_never_allowed_by_a_rule(
    stage: Stage, call: m.ToolCall, kind: m.PermissionKind
) -> None:
    """Only a user can decide them, whatever call the executor names with them; a rule may deny them."""
    asks = stage.host.play = _Both((call, kind))
    async with stage.hutchd():
        session = await stage.open()
        await stage.submit(session)
        asked = await asks.asked(stage, kind)

        await change_rules(stage, add=m.Rules(allow=(call.agent_tool,)))
        await set_mode(stage, session, "bypass")
        await judged_again(stage)
        still = await request(stage, asked.id)
        await change_rules(stage, add=m.Rules(deny=(call.agent_tool,)))
        await judged_again(stage)

        assert (still.state, (await request(stage, asked.id)).state) == ("pending", "denied")


async def test_another_users_change_concerns_nobody_else(stage: Stage) -> None:
    """A rule counts for its owner's sessions only."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()

        stranger = replace(stage.me, uid=4242)
        await stage.services.policy.change_rules(stranger, m.ChangeRules(add=m.Rules(allow=("Bash(make)",))))
        await judged_again(stage)

        assert (await request(stage, asked.id)).state == "pending"


# ---------------------------------------------------------------- races


class _Gate:
    """A play that begins when the test says so."""

    def __init__(self, play: Asks) -> None:
        self.play = play
        self.go = anyio.Event()

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await self.go.wait()
        return await self.play(executor, prompt)


@pytest.mark.parametrize("before", [m.Rules(), m.Rules(allow=("Bash(make)",))])
async def test_a_rule_added_between_verdict_and_record_is_seen(stage: Stage, before: m.Rules) -> None:
    """The call is judged once more: it is not asked about, and an overtaken allowance is not recorded."""
    asks = Asks(command("make"))
    gate = stage.host.play = _Gate(asks)
    async with stage.hutchd():
        session = await stage.open(rules=before)
        turn = await stage.submit(session)
        await stage.running(turn)
        async with busy_store(stage):
            stage.host.tasks.start_soon(partial(change_rules, stage, add=m.Rules(deny=("Bash(make:*)",))))
            await queued(stage, 1)
            gate.go.set()
            await queued(stage, 2)
        await stage.ended(turn)

        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        assert asks.decided["c-1"].decision == "deny"
        assert "permission_asked" not in await stage.kinds(session)
        assert [line.outcome for line in page.entries] == ["denied"]


async def test_trust_that_ends_between_verdict_and_record_is_seen(stage: Stage) -> None:
    """The call becomes a request: what the file allows does not count any more."""
    text = '[permissions]\nallow = ["Bash(make)"]\n'
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = "/proj/.hutch/policy.toml"
    asks = Asks(command("make"), project=m.ProjectFile(path, digest, text))
    gate = stage.host.play = _Gate(asks)
    async with stage.hutchd():
        await stage.services.policy.trust_policy(stage.me, m.TrustPolicy(path, digest))
        await stage.running(await stage.submit(await stage.open()))
        async with busy_store(stage):
            distrust = m.TrustPolicy(path, digest, trust=False)
            stage.host.tasks.start_soon(stage.services.policy.trust_policy, stage.me, distrust)
            await queued(stage, 1)
            gate.go.set()
            await queued(stage, 2)

        assert (await stage.pending()).call.command == "make"
        assert asks.decided == {}


async def test_a_mode_that_changes_while_a_request_is_settled_counts(stage: Stage) -> None:
    """A verdict that a change overtook settles nothing: the request is judged once more, and stays pending."""
    host_file = stage.folder / "policy.toml"
    host_file.write_text('[permissions]\nask = ["Bash(make:*)"]\n')
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open(permission_mode="bypass")
        await stage.submit(session)
        asked = await stage.pending()
        async with busy_store(stage):
            stage.host.tasks.start_soon(set_mode, stage, session, "ask")
            await queued(stage, 1)
            host_file.write_text("")
            await stage.services.approvals.approvals.look_at_host()
            await queued(stage, 2)
        await judged_again(stage)

        assert (await request(stage, asked.id)).state == "pending"


async def test_a_host_file_that_changes_while_a_request_is_settled_counts(stage: Stage) -> None:
    """It is not in the store; a change that was noticed before the settlement is recorded counts."""
    host_file = stage.folder / "policy.toml"
    host_file.write_text('[permissions]\nask = ["Bash(make:*)"]\n')
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(permission_mode="bypass"))
        await stage.pending()
        async with busy_store(stage):
            host_file.write_text("")
            await stage.services.approvals.approvals.look_at_host()
            await queued(stage, 1)
            host_file.write_text('[permissions]\ndeny = ["Bash(make:*)"]\n')
            await stage.services.approvals.approvals.look_at_host()
        await stage.ended(turn)

        assert asks.decided["c-1"].decision == "deny"


async def test_no_later_verdict_replaces_a_denial_that_is_not_stored_yet(stage: Stage) -> None:
    """The agent was denied the call, so the record says that too."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()
        with nothing_stored(stage):
            await stage.answer(asked, "deny", message="no")
        approvals = stage.services.approvals.approvals
        allowed = Settlement(state="allowed", settled_by="rule")

        await until(lambda: stage.store.available)
        row, won = await stage.store.write(
            partial(approvals._transactions.settle, permission=asked.id, settlement=allowed)
        )

        assert (row.state, row.message, won) == ("denied", "no", False)
        assert (await request(stage, asked.id)).state == "denied"


async def test_a_project_file_that_arrives_between_verdict_and_record_is_seen(stage: Stage) -> None:
    """It is not in the store, so the request is recorded, and judged again at once."""
    text = '[permissions]\ndeny = ["Bash(make:*)"]\n'
    project = m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(ls:*)",)))
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        async with busy_store(stage):
            stage.host.tasks.start_soon(partial(executor.ask, command("make"), turn=turn.id))
            await queued(stage, 1)
            stage.host.tasks.start_soon(partial(executor.ask, command("ls", "c-2"), turn=turn.id, project=project))
            await queued(stage, 2)

        async def denied() -> bool:
            return [one.state for one in await all_requests(stage)] == ["denied"]

        await until(denied)


async def test_an_edit_that_a_new_rule_overtakes_is_refused(stage: Stage) -> None:
    """The edited input is judged once more before it may run."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()
        outcomes: list[str] = []

        async def edit() -> None:
            try:
                await stage.answer(asked, "allow", updated_input={"command": "rm x"})
                outcomes.append("allowed")
            except HutchError as error:
                outcomes.append(error.reason.word)

        async with busy_store(stage):
            stage.host.tasks.start_soon(partial(change_rules, stage, add=m.Rules(deny=("Bash(rm:*)",))))
            await queued(stage, 1)
            stage.host.tasks.start_soon(edit)
            await queued(stage, 2)
        await until(lambda: bool(outcomes))

        assert outcomes == [Reason.POLICY_FORBIDS.word]
        assert (await request(stage, asked.id)).state == "pending"


async def test_a_user_and_a_rule_settle_a_request_once(stage: Stage) -> None:
    """Whichever is first stands; the record has one decision."""
    asks = stage.host.play = Asks(*(command("make", f"c-{at}") for at in range(8)))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)

        async def all_asked() -> bool:
            return len(await all_requests(stage)) == 8

        await until(all_asked)
        page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())

        async def deny(asked: m.Permission) -> None:
            with suppress(HutchError):
                await stage.answer(asked, "deny")

        async with anyio.create_task_group() as tasks:
            for at, asked in enumerate(page.permissions):
                tasks.start_soon(deny, asked)
                if at == 3:
                    tasks.start_soon(partial(change_rules, stage, add=m.Rules(allow=("Bash(make)",))))
        await stage.ended(turn)

        audit = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        settled = [event for event in await stage.events(session) if event.kind == "permission_settled"]
        assert len(asks.decided) == 8
        assert len(settled) == len({line.subject for line in audit.entries if line.subject and line.subject[0] == "p"})


# ---------------------------------------------------------------- executors that are away, restarts, bad disks


async def test_nothing_is_allowed_while_its_executor_is_away(stage: Stage) -> None:
    """Its paths cannot be resolved. When it asks again they are, and the rule counts; a link out does not pass."""
    outside = to_call("Edit", {"file_path": "/proj/link", "old_string": "a", "new_string": "b"}, "c-2", "/proj")
    stage.host.play = Asks(EDIT, outside)
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        executor.real = {"/proj/link": "/etc/passwd"}

        async def both_asked() -> bool:
            page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions())
            return len(page.permissions) == 2

        await until(both_asked)
        by_call = {one.call.call_id: one for one in await all_requests(stage)}
        executor.hang_up()
        await change_rules(stage, add=m.Rules(allow=("Edit(**)",)))
        await judged_again(stage)
        away = [one.state for one in await all_requests(stage)]
        asks = await asks_of(stage)

        await executor.dial()
        for call in (EDIT, outside):
            again = partial(executor.ask, call, ask=asks[by_call[call.call_id].id], turn=turn.id)
            stage.host.tasks.start_soon(again)
        await until(lambda: stage_state(stage, by_call["c-1"].id, "allowed"))
        await judged_again(stage)

        assert away == ["pending", "pending"]
        assert (await request(stage, by_call["c-2"].id)).state == "pending"


async def test_no_command_is_allowed_while_its_executor_is_away(stage: Stage) -> None:
    """A command may read its directory's files: what it needs is known when its executor is back."""
    stage.host.play = never_end
    async with stage.hutchd():
        turn, asked, ask = await asked_and_left(stage, await stage.open())
        executor = stage.executor
        executor.hang_up()
        await set_mode_of(stage, turn, "bypass")
        await judged_again(stage)
        away = (await request(stage, asked.id)).state

        await executor.dial()
        decision = await executor.ask(command("make"), ask=ask, turn=turn.id)

        assert (away, decision.decision) == ("pending", "allow")


async def set_mode_of(stage: Stage, turn: m.Turn, mode: m.PermissionMode) -> None:
    await stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(turn.session, mode))


async def stage_state(stage: Stage, permission: str, state: str) -> bool:
    return (await request(stage, permission)).state == state


async def all_requests(stage: Stage) -> tuple[m.Permission, ...]:
    params = m.ListPermissions(state=None, limit=10_000)
    return (await stage.services.approvals.list_permissions(stage.me, params)).permissions


async def asks_of(stage: Stage) -> dict[str, str]:
    """Return the executors' own ids of all requests, by the request's id."""
    rows = await stage.store.read(lambda conn: permissions.list_(conn, state=None))
    return {row.id: row.ask for row in rows}


async def test_a_denial_needs_no_executor(stage: Stage) -> None:
    """A rule that denies settles the request although the executor that asked is away."""
    stage.host.play = Asks(EDIT)
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        executor = await stage.running(turn)
        asked = await stage.pending()
        executor.hang_up()

        await change_rules(stage, add=m.Rules(deny=("Edit(/a)",)), cwd="/proj")
        await judged_again(stage)

        assert (await request(stage, asked.id)).state == "denied"


async def asked_and_left(stage: Stage, session: m.Session, **changes: Any) -> tuple[m.Turn, m.Permission, str]:
    """Let the executor ask about `make`, and stop waiting. Return the turn, the request and the executor's id of it."""
    turn = await stage.submit(session)
    executor = await stage.running(turn)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(executor.ask, command("make"), **changes))
        asked = await stage.pending()
        tasks.cancel_scope.cancel()
    return turn, asked, (await asks_of(stage))[asked.id]


@pytest.mark.parametrize(("effect", "states"), [("deny", ("denied", "denied")), ("allow", ("pending", "allowed"))])
async def test_requests_of_an_earlier_hutchd_are_judged_again(
    stage: Stage, effect: str, states: tuple[str, str]
) -> None:
    """A denial counts at once. Nothing is allowed before the executor asks again: a project's file might deny it."""
    host_file = stage.folder / "policy.toml"
    host_file.write_text('[permissions]\nask = ["Bash(make:*)"]\n')
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(make)",)))
        turn, asked, ask = await asked_and_left(stage, session)
    host_file.write_text('[permissions]\ndeny = ["Bash(make:*)"]\n' if effect == "deny" else "")
    async with stage.hutchd():
        await judged_again(stage)
        before = (await request(stage, asked.id)).state
        await stage.executor.dial()
        await change_rules(stage, add=m.Rules(allow=("Bash(ls:*)",)))
        await judged_again(stage)
        connected = (await request(stage, asked.id)).state
        decision = await stage.executor.ask(command("make"), ask=ask, turn=turn.id)

        assert connected == before
        assert (before, (await request(stage, asked.id)).state) == states
        assert decision.decision == effect


async def test_after_a_restart_the_projects_file_counts(stage: Stage) -> None:
    """The executor sends the file when it asks again, and a request that the file asks about stays pending."""
    text = '[permissions]\nask = ["Bash(make:*)"]\n'
    project = m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(make)",)))
        turn, asked, ask = await asked_and_left(stage, session, project=project)
    async with stage.hutchd():
        await stage.executor.dial()
        again = partial(stage.executor.ask, command("make"), ask=ask, turn=turn.id, project=project)
        stage.host.tasks.start_soon(again)

        async def file_known() -> bool:
            view = await stage.services.policy.show_policy(stage.me, m.ShowPolicy(session.id))
            return "project" in [layer.name for layer in view.layers]

        await until(file_known)
        await judged_again(stage)

        assert (await request(stage, asked.id)).state == "pending"


async def test_a_request_is_judged_again_once_the_store_can_be_written(stage: Stage) -> None:
    """While it cannot, the request stays pending; nothing is lost."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        await stage.pending()

        with nothing_stored(stage):
            (stage.folder / "policy.toml").write_text('[permissions]\ndeny = ["Bash(make:*)"]\n')
            await stage.services.approvals.approvals.look_at_host()
            await until(lambda: not stage.store.available)
            blocked = (await all_requests(stage))[0].state
        ended = await stage.ended(turn)

        assert (blocked, ended.state) == ("pending", "completed")
        assert (await all_requests(stage))[0].state == "denied"


# ---------------------------------------------------------------- random changes

CALLS: tuple[tuple[m.ToolCall, m.PermissionKind], ...] = (
    *((to_call("Bash", {"command": line}, f"b{line}", "/proj"), "tool") for line in ("make", "git fetch", "rm -r /")),
    *((to_call("Edit", {"file_path": path}, f"e{path}", "/proj"), "tool") for path in ("/proj/a", "/proj/link", "/b")),
    (to_call("Read", {"file_path": "/etc/hosts"}, "r", "/proj"), "tool"),
    (to_call("WebFetch", {"url": "https://a.example/x"}, "w", "/proj"), "tool"),
    (to_call("mcp__files__list", {}, "m", "/proj"), "tool"),
    (to_call("AskUserQuestion", {"questions": [{"question": "Which?"}]}, "q", "/proj"), "question"),
    (to_call("ExitPlanMode", {"plan": "# Do"}, "p", "/proj"), "plan"),
)
RULES = (
    *("Bash(make)", "Bash(git fetch:*)", "Bash", "Edit(**)", "Edit(/a)", "Edit(//b)", "Read(//etc/**)", "Read"),
    *("WebFetch(domain:a.example)", "WebFetch", "mcp__files", "mcp__files__list", "AskUserQuestion", "ExitPlanMode"),
)
MODES: tuple[m.PermissionMode, ...] = (*("ask", "accept_edits", "plan") * 3, "bypass", "bypass", "unattended")
EFFECTS = ("allow", "ask", "deny")


class Changes:
    """Makes random changes of what judges, and compares every request with what `explain` says after each."""

    def __init__(self, stage: Stage, random: Random, calls: int) -> None:
        """Each session asks about `calls` of the calls, chosen at random."""
        self.stage = stage
        self.random = random
        self.calls = calls
        self.calls_of: dict[str, list[tuple[m.ToolCall, m.PermissionKind]]] = {}
        self.sessions: list[m.Session] = []
        self.turns: dict[str, m.Turn] = {}
        self.executors: dict[str, FakeExecutor] = {}
        self.pending: dict[tuple[str, str], str] = {}
        self.history: list[str] = []
        self.settled: dict[str, int] = {}
        """How many requests were settled, by `settled_by` and state."""
        self.asked = 0
        self.added: list[tuple[str, str]] = []

    async def open(self, count: int) -> None:
        for at in range(count):
            options = m.AgentOptions(mcp_servers={"files": {}})
            session = await self.stage.open(name=f"s-{at}", options=options)
            turn = await self.stage.submit(session)
            executor = await self.stage.running(turn)
            executor.real = {"/proj/link": "/etc/passwd"}
            self.sessions.append(session)
            self.calls_of[session.id] = self.random.sample(CALLS, self.calls)
            self.turns[session.id], self.executors[session.id] = turn, executor

    async def ask(self) -> None:
        """Ask about some calls that are not pending, in every session."""
        waiting: list[tuple[str, str]] = []
        decided: dict[tuple[str, str], m.PermissionDecision] = {}

        async def ask(session: str, call: m.ToolCall, kind: m.PermissionKind) -> None:
            questions = (m.Question("Which?"),) if kind == "question" else ()
            turn = self.turns[session].id
            key = (session, call.call_id)
            decided[key] = await self.executors[session].ask(call, kind=kind, questions=questions, turn=turn)

        for session in self.sessions:
            executor = self.executors[session.id]
            assert executor.connection is not None
            assert executor.connection.known is not None
            self.stage.services.executors.heartbeat(executor.connection.known, m.Heartbeat(executor.turn))
            for call, kind in self.random.sample(self.calls_of[session.id], 2):
                if (session.id, call.call_id) not in self.pending:
                    waiting.append((session.id, call.call_id))
                    self.stage.host.tasks.start_soon(ask, session.id, call, kind)

        async def all_in() -> bool:
            await self._look()
            return all(key in decided or key in self.pending for key in waiting)

        await until(all_in)
        self.asked += len(waiting)

    async def _look(self) -> None:
        page = await self.stage.services.approvals.list_permissions(self.stage.me, m.ListPermissions(limit=1000))
        self.pending = {(one.session, one.call.call_id): one.id for one in page.permissions}

    async def change(self) -> None:
        """Make one random change."""
        random, stage = self.random, self.stage
        session = random.choice(self.sessions)
        kind = random.choice(["rule", "rule", "rule", "mode", "mode", "answer", "trust", "host", "project"])
        rule, effect = random.choice(RULES), random.choice(EFFECTS)
        self.history.append(f"{kind} {rule} {effect} {session.name}")
        match kind:
            case "rule":
                if len(self.added) > random.randrange(12):
                    effect, rule = self.added.pop(random.randrange(len(self.added)))
                    await change_rules(stage, remove=m.Rules(**{effect: (rule,)}), cwd="/proj")
                elif (effect, rule) not in self.added:
                    self.added.append((effect, rule))
                    await change_rules(stage, add=m.Rules(**{effect: (rule,)}), cwd="/proj")
            case "mode":
                mode = random.choice(MODES)
                self.history[-1] += f" {mode}"
                with suppress(HutchError):
                    await set_mode(stage, session, mode)
            case "answer":
                page = await stage.services.approvals.list_permissions(stage.me, m.ListPermissions(limit=1000))
                if page.permissions:
                    asked = random.choice(page.permissions)
                    decision: m.Decision = random.choice(["allow", "deny"])
                    scope: m.Scope = random.choice(["session", "session", "always"])
                    with suppress(HutchError):
                        await stage.answer(asked, decision, scope=scope, rule=None if decision == "allow" else rule)
            case "trust":
                text = random.choice(PROJECTS)
                digest = hashlib.sha256(text.encode()).hexdigest()
                trust = m.TrustPolicy("/proj/.hutch/policy.toml", digest, trust=random.random() < 0.7)
                await stage.services.policy.trust_policy(stage.me, trust)
            case "host":
                (stage.folder / "policy.toml").write_text(random.choice(HOSTS))
            case "project":
                text = random.choice(PROJECTS)
                project = m.ProjectFile("/proj/.hutch/policy.toml", hashlib.sha256(text.encode()).hexdigest(), text)
                call = to_call("Read", {"file_path": "/proj/x"}, f"x-{len(self.history)}", "/proj")
                turn = self.turns[session.id].id
                stage.host.tasks.start_soon(partial(self.executors[session.id].ask, call, turn=turn, project=project))

                async def file_known() -> bool:
                    seen = stage.services.policy._layers._projects.get(session.id)
                    return seen is not None and seen.file == project and not seen.removed

                await until(file_known)

    async def check(self) -> None:
        """Compare every request with what `explain` says."""
        before = set(self.pending.values())
        await judged_again(self.stage)
        for one in await all_requests(self.stage):
            if one.id not in before or one.call.call_id.startswith("x-"):
                continue
            by = one.settled_by or ""
            if one.state != "pending" and not (by == "rule" or by.startswith("mode ")):
                continue  # a user decided it
            params = m.ExplainPolicy(one.call.agent_tool, one.call.input, session=one.session)
            said = (await self.stage.services.policy.explain_policy(self.stage.me, params)).decision
            expected = {"pending": "ask", "allowed": "allow", "denied": "deny"}[one.state]
            assert said == expected, (one.state, by, one.settled_rule, one.call, said, self.history[-5:])
            if one.state != "pending":
                key = f"{one.state} by {by.split()[0]}"
                self.settled[key] = self.settled.get(key, 0) + 1
        await self._look()


PROJECTS = (
    "[permissions]\n",
    '[permissions]\nallow = ["Bash(make)", "Edit(**)"]\n',
    '[permissions]\ndeny = ["Bash(git:*)"]\nask = ["Read"]\n',
)
HOSTS = ("", '[permissions]\ndeny = ["WebFetch"]\n', '[permissions]\nallow = ["Read"]\nask = ["Bash(make:*)"]\n', "[[[")


async def random_changes(stage: Stage, count: int, number: int, *, calls: int = 4) -> Changes:
    """Make random changes while calls of two sessions wait; check each request after each change."""
    stage.host.play = never_end
    async with stage.hutchd():
        changes = Changes(stage, Random(number), calls)
        await changes.open(2)
        for _ in range(count):
            await changes.ask()
            await changes.change()
            await changes.check()
    return changes


async def test_no_request_waits_that_explain_would_decide(stage: Stage) -> None:
    """After each of 200 random changes, every request is as `explain` says: it asks about those that wait."""
    print(f"seed {seed()}")

    changes = await random_changes(stage, 200, seed())

    print(changes.asked, "calls;", changes.settled)
    assert sum(changes.settled.values()) >= 5, f"seed {seed()}: {changes.settled}"


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_request_of_many_waits_that_explain_would_decide(stage: Stage) -> None:
    """The same after each of 2,000 changes, with all calls."""
    print(f"seed {seed()}")

    print((await random_changes(stage, 2_000, seed(), calls=len(CALLS))).settled)
