"""The parts of a session's policy: rules of account and session, tool options, project file, mode."""

from __future__ import annotations

from typing import Any

import pytest

from hutch_daemon.services.access import Caller
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from hutch_shared.project_file import UNUSABLE
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import Stage, until


def call_of(tool: str, action: m.Action, **given: Any) -> m.ToolCall:
    """Return a call whose paths are those of its input."""
    paths = (given["file_path"],) if "file_path" in given else ()
    return m.ToolCall("c-1", action, tool, given, command=given.get("command"), paths=paths)


MAKE = call_of("Bash", "run_command", command="make")
PLAN = call_of("ExitPlanMode", "plan", plan="# Do")


def asking(call: m.ToolCall, **changes: Any) -> Any:
    """Return a play that requests permission for one call."""

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await executor.ask(call, **changes)
        return TurnEnded("completed", "done", "Done.")

    return play


async def explained(stage: Stage, caller: Caller, command: str, **where: Any) -> str:
    """Return the decision that a command would get."""
    params = m.ExplainPolicy("Bash", {"command": command}, **where)
    return (await stage.services.policy.explain_policy(caller, params)).decision


@pytest.mark.parametrize("before", ["ask", "accept_edits", "unattended"])
async def test_an_approved_plan_restores_the_mode_before_it(stage: Stage, before: m.PermissionMode) -> None:
    """The decision itself changes the mode, so the next call is judged by it. The executor is notified."""
    stage.host.play = asking(PLAN, kind="plan", plan="# Do")
    async with stage.hutchd():
        session = await stage.open(permission_mode=before)
        await stage.services.modes.set_permission_mode(stage.me, m.SetPermissionMode(session.id, "plan"))
        turn = await stage.submit(session)

        await stage.answer(await stage.pending(), "allow")
        await stage.ended(turn)
        now = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        audit = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="set_permission_mode"))
        told = [params for name, params in stage.executor.calls if name == "set_permission_mode"]

        assert now.permission_mode == before
        assert [line.outcome for line in audit.entries] == ["plan", before]
        assert told[-1] == m.SetMode(session.id, before)


async def test_a_session_that_began_in_plan_mode_continues_in_ask(stage: Stage) -> None:
    """It has no earlier mode; a denied plan changes nothing."""
    stage.host.play = asking(PLAN, kind="plan", plan="# Do")
    async with stage.hutchd():
        session = await stage.open(permission_mode="plan")
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "deny")
        await stage.ended(turn)
        denied = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "allow")
        await stage.ended(turn)
        allowed = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

        assert (denied.permission_mode, allowed.permission_mode) == ("plan", "ask")


async def test_a_plan_takes_no_answers(stage: Stage) -> None:
    """A plan can only be allowed or denied."""
    stage.host.play = asking(PLAN, kind="plan", plan="# Do")
    async with stage.hutchd():
        await stage.submit(await stage.open())

        with pytest.raises(HutchError, match="allowed or denied"):
            await stage.answer(await stage.pending(), "answer", answers={"a": "b"})


async def test_tools_of_the_agents_options_are_rules_of_the_session(stage: Stage) -> None:
    """Allowed tools become allow rules, and disallowed tools deny rules, whatever the agent does with the options."""
    async with stage.hutchd():
        options = m.AgentOptions(allowed_tools=("Bash(ls:*)",), disallowed_tools=("Bash(rm:*)", "WebFetch"))
        session = await stage.open(options=options, rules=m.Rules(allow=("Bash(rm:*)",)))

        assert session.rules == m.Rules(("Bash(rm:*)", "Bash(ls:*)"), (), ("Bash(rm:*)", "WebFetch"))
        decided = [await explained(stage, stage.me, line, session=session.id) for line in ("ls -l", "rm x", "make")]
        assert decided == ["allow", "deny", "ask"]


@pytest.mark.parametrize(
    "changes",
    [{"rules": m.Rules(deny=("Bash(ls",))}, {"options": m.AgentOptions(allowed_tools=("Bash(ls",))}],
)
async def test_a_session_with_a_rule_that_cannot_be_read_is_not_opened(stage: Stage, changes: dict[str, Any]) -> None:
    """The user gets the error at once."""
    async with stage.hutchd():
        with pytest.raises(HutchError) as refused:
            await stage.open(**changes)

        assert refused.value.reason is Reason.INVALID_RULE
        assert (await stage.services.sessions.list_sessions(stage.me, m.ListSessions())).sessions == ()


async def test_rules_of_an_account_apply_to_no_other(stage: Stage) -> None:
    """Neither added rules nor those from `always` do, even in the same directory."""
    other = Caller(stage.me.uid + 1, stage.me.gid, stage.me.pid, "test")
    stage.host.play = asking(MAKE)
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        await stage.answer(await stage.pending(), "allow", scope="always", rule="Bash(make)")
        await stage.ended(turn)
        await stage.services.policy.change_rules(stage.me, m.ChangeRules(add=m.Rules(allow=("Bash(ls:*)",))))

        assert [await explained(stage, stage.me, line, cwd="/proj") for line in ("make", "ls")] == ["allow", "allow"]
        assert [await explained(stage, other, line, cwd="/proj") for line in ("make", "ls")] == ["ask", "ask"]
        assert await explained(stage, stage.me, "make", cwd="/elsewhere") == "ask"


async def test_removing_a_missing_rule_is_an_error(stage: Stage) -> None:
    """Nothing changes, so the user notices a mistyped rule."""
    async with stage.hutchd():
        await stage.services.policy.change_rules(stage.me, m.ChangeRules(add=m.Rules(deny=("Bash(rm:*)",))))

        with pytest.raises(HutchError, match="no rule to deny"):
            await stage.services.policy.change_rules(
                stage.me, m.ChangeRules(remove=m.Rules(deny=("Bash(rm:*)", "Bash(rn:*)")))
            )
        assert await explained(stage, stage.me, "rm x", cwd="/proj") == "deny"


async def test_an_invalid_project_file_makes_everything_ask(stage: Stage) -> None:
    """The permission request and the explanation say why."""
    file = m.ProjectFile("/proj/.hutch/policy.toml", "-", f"{UNUSABLE}it is not a regular file")
    stage.host.play = asking(MAKE, project=file)
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(allow=("Bash(make)",)))
        turn = await stage.submit(session)
        asked = await stage.pending()
        view = await stage.services.policy.show_policy(stage.me, m.ShowPolicy(session.id))
        await stage.answer(asked, "deny")
        await stage.ended(turn)

        assert "Every call asks" in asked.why
        assert "it is not a regular file" in asked.why
        assert view.problems == ("/proj/.hutch/policy.toml: it is not a regular file",)


async def test_a_projects_rules_can_be_explained_without_a_session(stage: Stage) -> None:
    """The client reads the file, whose rules apply as in a session."""
    file = m.ProjectFile("", "", '[permissions]\nallow = ["Bash(ls)"]\ndeny = ["Bash(rm:*)"]\n')
    async with stage.hutchd():
        decided = [await explained(stage, stage.me, line, cwd="/proj", project=file) for line in ("ls", "rm x")]
        view = await stage.services.policy.show_policy(stage.me, m.ShowPolicy(cwd="/proj", project=file))

        assert decided == ["ask", "deny"]
        assert [layer.name for layer in view.layers] == ["project"]


async def test_an_edited_input_waits_for_the_executor_that_resolves_its_paths(stage: Stage) -> None:
    """Otherwise hutchd would miss a deny rule for the target of a link."""
    stage.host.play = asking(call_of("Read", "read", file_path="/elsewhere/a"))
    async with stage.hutchd():
        session = await stage.open(rules=m.Rules(deny=("Read(.env)",)))
        await stage.submit(session)
        asked = await stage.pending()
        stage.executor.real["/elsewhere/link"] = "/elsewhere/.env"
        edited = {"file_path": "/elsewhere/link"}
        with pytest.raises(HutchError) as denied:
            await stage.answer(asked, "allow", updated_input=edited)
        stage.executor.hang_up()
        with pytest.raises(HutchError) as away:
            await stage.answer(asked, "allow", updated_input=edited)

        assert denied.value.reason is Reason.POLICY_FORBIDS
        assert away.value.reason is Reason.CONNECTION_LOST
        assert (await stage.pending()).id == asked.id


async def test_after_a_restart_a_request_brings_the_projects_file_again(stage: Stage) -> None:
    """An edited input is judged by it, although this hutchd did not judge the request itself."""
    file = m.ProjectFile("/proj/.hutch/policy.toml", "-", '[permissions]\ndeny = ["Bash(rm:*)"]\n')
    stage.host.play = asking(MAKE, project=file, ask="ask-1")
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()
    async with stage.hutchd():
        await stage.executor.dial()
        stage.host.tasks.start_soon(_ask_again, stage.executor, turn, file)
        await until(lambda: _knows_project(stage, session))
        with pytest.raises(HutchError) as denied:
            await stage.answer(asked, "allow", updated_input={"command": "rm x"})

        assert denied.value.reason is Reason.POLICY_FORBIDS


async def _ask_again(executor: FakeExecutor, turn: m.Turn, file: m.ProjectFile) -> None:
    await executor.ask(MAKE, ask="ask-1", turn=turn.id, project=file)


async def _knows_project(stage: Stage, session: m.Session) -> bool:
    view = await stage.services.policy.show_policy(stage.me, m.ShowPolicy(session.id))
    return any(layer.name == "project" for layer in view.layers)


async def test_paths_are_judged_where_the_work_directory_really_is(stage: Stage) -> None:
    """The executor reports the real path, which becomes the session's directory."""
    stage.host.work_really_is = "/data/work"
    async with stage.hutchd():
        session = await stage.open(cwd="/link")
        await until(lambda: _is_in(stage, session, "/data/work"))


async def _is_in(stage: Stage, session: m.Session, cwd: str) -> bool:
    return (await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))).cwd == cwd


@pytest.mark.parametrize(("server", "decision"), [("foo__bar", "ask"), ("foo", "allow")])
async def test_the_server_of_a_tool_is_one_of_the_sessions(stage: Stage, server: str, decision: str) -> None:
    """`mcp__foo` allows no tool of the server `foo__bar`, whatever the executor calls the server; `explain` agrees."""
    decided: list[m.PermissionDecision] = []
    call = m.ToolCall("c-1", "mcp", "mcp__foo__bar__do", {}, server="foo", tool="bar__do")

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        decided.append(await executor.ask(call))
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = play
    async with stage.hutchd():
        options = m.AgentOptions(mcp_servers={server: {"command": "x"}})
        session = await stage.open(options=options, rules=m.Rules(allow=("mcp__foo",)))
        turn = await stage.submit(session)
        params = m.ExplainPolicy(call.agent_tool, {}, session=session.id)
        explanation = await stage.services.policy.explain_policy(stage.me, params)
        if decision == "ask":
            asked = await stage.pending()
            assert (asked.call.server, asked.call.tool) == ("foo__bar", "do")
            await stage.answer(asked, "deny")
        await stage.ended(turn)

        assert explanation.decision == decision
        assert decided[0].decision == ("allow" if decision == "allow" else "deny")


async def test_instruction_files_are_judged_by_the_rules(stage: Stage) -> None:
    """A rule that denies withholds any file; one that asks, or that cannot be read, withholds an imported file."""
    files = {f"/proj/{name}": f"/proj/{name}" for name in ("CLAUDE.md", "denied.md", "asked.md", "docs/a.md")}
    files["/proj/link.md"] = "/proj/denied.md"
    rules = m.Rules(ask=("Read(asked.md)",), deny=("Read(denied.md)",))
    broken = m.ProjectFile("/proj/.hutch/policy.toml", "", f"{UNUSABLE}it is a link")
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(rules=rules)
        executor = await stage.running(await stage.submit(session))
        assert executor.connection is not None
        known = executor.connection.known
        assert known is not None
        judge = stage.services.policy.judge_reads
        imported = await judge(known, m.JudgeReads(session.id, imported=files))
        named = await judge(known, m.JudgeReads(session.id, named=files))
        unsure = await judge(known, m.JudgeReads(session.id, {"/proj/CLAUDE.md": "/proj/CLAUDE.md"}, files, broken))

    assert set(imported.withheld) == {"/proj/denied.md", "/proj/asked.md", "/proj/link.md"}
    assert set(named.withheld) == {"/proj/denied.md", "/proj/link.md"}
    assert "Read(denied.md)" in named.withheld["/proj/link.md"]
    assert set(unsure.withheld) == set(files)


async def test_changed_instructions_are_reported_once(stage: Stage) -> None:
    """The first start reports them; a start with the same files does not."""
    read = m.Instructions(
        (m.InstructionFile("/proj/CLAUDE.md", 5),), (m.InstructionFile("/proj/x", why="it is a pipe"),)
    )
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        counts = []
        for stage.host.instructions in (read, read, m.Instructions(), m.Instructions()):
            (await stage.running(await stage.submit(session))).die()
            notices = [event for event in await stage.events(session) if b'"word":"instructions"' in bytes(event.data)]
            counts.append(len(notices))
        now = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert counts == [1, 1, 2, 2]
    assert b"1 instruction file. Not given: /proj/x: it is a pipe." in bytes(notices[0].data)
    assert now.instructions == m.Instructions()
