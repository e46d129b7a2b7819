"""The policy with the real Claude CLI: every call is judged, requests wait, and only the judged input runs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from tests.rehearsal import Model
from tests.sampling import sample
from tests.system.host import Host
from tests.system.log import Log, allow, log_of, wait_for
from tests.system.policing import (
    PLAN_FILE,
    Call,
    asked_of,
    audit_of,
    bash,
    deny,
    pending_of,
    policed_claude,
    results_of,
    told,
    what,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host without a policy file, whose model obeys."""
    async with policed_claude(model) as made:
        yield made


def files_in(session: m.Session) -> set[str]:
    """Return the files that the session's calls created."""
    return {path.name for path in Path(session.cwd).iterdir()}


@sample(2)
@pytest.mark.parametrize(
    ("mode", "asked", "refused"),
    [
        ("ask", {"ls", "Write new"}, set()),
        ("accept_edits", {"ls"}, set()),
        ("plan", {"ls", "Write new", "touch made"}, set()),
        ("bypass", set(), set()),
        ("unattended", set(), {"ls", "Read old", "Write new"}),
    ],
)
async def test_each_mode_asks_about_its_calls(
    claude_host: Host, hutch: HutchClient, mode: m.PermissionMode, asked: set[str], refused: set[str]
) -> None:
    """Read-only commands, which the CLI itself would not ask about, are judged like all others."""
    rules = m.Rules(allow=("Bash(touch made)",))
    session = await claude_host.claude(hutch, f"mode-{mode}", mode, rules=rules)
    Path(session.cwd, "old").write_text("old\n")
    reads: list[Call] = [bash("ls"), ("Read", {"file_path": f"{session.cwd}/old"})]
    changes: list[Call] = [("Write", {"file_path": f"{session.cwd}/new", "content": "x"}), bash("touch made")]
    async with log_of(hutch, session) as log:
        end = await log.play(session, told(reads, changes), allow)

        everything = {"ls", "Read old", "Write new", "touch made"}
        assert end.state == "completed", end
        assert set(asked_of(log)) == asked
        assert results_of(log) == {call: call not in refused for call in everything}
        assert files_in(session) == {"old", "made"} | ({"new"} - {name.split()[-1] for name in refused})
        decided = await audit_of(hutch, session, action="permission")
        assert len(decided) == 4
        assert all(line.digest for line in decided)


async def test_parallel_calls_are_decided_in_any_order(claude_host: Host, hutch: HutchClient) -> None:
    """Each call has its own request, and a decision covers only that request."""
    session = await claude_host.claude(hutch, "parallel", "ask")
    commands = [f"cat {number}" for number in range(4)]
    for number in range(4):
        Path(session.cwd, str(number)).write_text(f"text {number}\n")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash(command) for command in commands]))
        waiting = {what(asked): asked for asked in await pending_of(hutch, session, 4)}
        for command in reversed(commands):
            answer = deny if command == "cat 1" else allow
            await hutch.answer_permission(answer(waiting[command]))
        end = await log.ended(turn)

        assert end.state == "completed", end
        assert results_of(log) == {command: command != "cat 1" for command in commands}
        texts = [result.text.strip() for result in log.of("tool_result") if not result.is_error]
        assert sorted(texts) == ["text 0", "text 2", "text 3"]


async def test_a_deny_rule_holds_in_bypass(claude_host: Host, hutch: HutchClient) -> None:
    """The rule holds wherever the command stands in the line, even if the CLI would not ask about it."""
    rules = m.Rules(deny=("Bash(rm:*)", "Bash(ls:*)"))
    session = await claude_host.claude(hutch, "denied", "bypass", rules=rules)
    Path(session.cwd, "kept").touch()
    commands = ["touch made", "touch also && rm -f kept", "ls", "echo $(rm kept)"]
    async with log_of(hutch, session) as log:
        end = await log.play(session, told(*([bash(command)] for command in commands)))

        assert end.state == "completed", end
        assert results_of(log) == {command: command == "touch made" for command in commands}
        assert files_in(session) == {"kept", "made"}
        assert "Bash(rm:*)" in log.of("tool_result")[1].text


async def test_an_edited_input_is_judged_and_replaces_the_requested_one(claude_host: Host, hutch: HutchClient) -> None:
    """The user edits with `hutch approve --edit`; an edit that a rule denies leaves the request pending."""
    session = await claude_host.claude(hutch, "edited", "ask", rules=m.Rules(deny=("Bash(rm:*)",)))
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch asked")]))
        asked = await log.asked()
        refused = await claude_host.hutch("approve", asked.id, "--edit", env={"EDITOR": "sed -i s/touch/rm/"}, code=4)
        still = await hutch.list_permissions(m.ListPermissions(session.id))
        await claude_host.hutch("approve", asked.id, "--edit", env={"EDITOR": "sed -i s/asked/judged/"})
        end = await log.ended(turn)

        (result,) = log.of("tool_result")
        (line,) = await audit_of(hutch, session, action="permission")
        assert "Bash(rm:*)" in refused.err
        assert [one.id for one in still] == [asked.id]
        assert end.state == "completed", end
        assert files_in(session) == {"judged"}
        assert line.digest == result.digest != asked.digest
        assert result.digest == input_digest("Bash", {**asked.call.input, "command": "touch judged"})


async def test_a_denial_gives_a_message_or_stops_the_turn(claude_host: Host, hutch: HutchClient) -> None:
    """`hutch deny -m` reaches the model, which goes on; `--stop` ends the turn."""
    session = await claude_host.claude(hutch, "refused", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one")], [bash("touch two")], [bash("true")]))
        await claude_host.hutch("deny", (await log.asked()).id, "-m", "not on a Sunday")
        second = await log.asked()
        heard = log.of("tool_result")[0].text
        await claude_host.hutch("deny", second.id, "--stop")
        end = await log.ended(turn)

        assert "not on a Sunday" in heard
        assert end.state == "stopped"
        assert asked_of(log) == ["touch one", "touch two"]
        assert files_in(session) == set()


async def test_nothing_starts_after_an_interrupt_was_acknowledged(claude_host: Host, hutch: HutchClient) -> None:
    """Pending requests are withdrawn; a late decision is refused with that reason."""
    session = await claude_host.claude(hutch, "interrupted", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one"), bash("touch two")]))
        asked = await log.asked()
        await hutch.interrupt_turn(session.id)
        end = await log.ended(turn)
        with pytest.raises(HutchError) as late:
            await hutch.answer_permission(allow(asked))

        assert end.state == "stopped"
        assert late.value.reason is Reason.ALREADY_SETTLED
        assert late.value.details["permission"]["state"] == "withdrawn"
        assert files_in(session) == set()


async def test_the_mode_changes_during_a_turn_and_is_recorded(claude_host: Host, hutch: HutchClient) -> None:
    """It applies to the next call. A pending request stays. The event and the audit name the user."""
    session = await claude_host.claude(hutch, "changed", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one")], [bash("touch two")]))
        asked = await log.asked()
        await claude_host.hutch("mode", session.id, "bypass")
        waiting = await hutch.list_permissions(m.ListPermissions(session.id))
        await hutch.answer_permission(allow(asked))
        end = await log.ended(turn)

        (line,) = await audit_of(hutch, session, action="set_permission_mode")
        assert [one.id for one in waiting] == [asked.id]
        assert end.state == "completed", end
        assert asked_of(log) == ["touch one"]
        assert files_in(session) == {"one", "two"}
        assert (line.outcome, line.details) == ("bypass", {"from": "ask", "to": "bypass"})
        assert _modes(log) == [("ask", "bypass")]


def _modes(log: Log) -> list[tuple[str, str]]:
    notices = [one.details for one in log.of("notice") if one.word == "permission_mode"]
    return [(one["from"], one["to"]) for one in notices]


async def test_an_approved_plan_ends_planning(claude_host: Host, hutch: HutchClient) -> None:
    """The mode before planning is restored and recorded: the next edit is not asked about."""
    session = await claude_host.claude(hutch, "planned", "accept_edits")
    plan: Call = ("Write", {"file_path": PLAN_FILE, "content": "# Make it"})
    write: Call = ("Write", {"file_path": f"{session.cwd}/made", "content": "x"})
    async with log_of(hutch, session) as log:
        await claude_host.hutch("mode", session.id, "plan")
        turn = await hutch.submit_prompt(session.id, told([plan], [("ExitPlanMode", {})], [write]))
        await claude_host.hutch("approve", (await log.asked()).id)
        asked = await log.asked()
        await claude_host.hutch("approve", asked.id)
        end = await log.ended(turn)

        lines = await audit_of(hutch, session, action="set_permission_mode")
        assert (asked.kind, asked.plan) == ("plan", "# Make it")
        assert end.state == "completed", end
        assert len(asked_of(log)) == 2
        assert files_in(session) == {"made"}
        assert (await hutch.get_session(session.id)).permission_mode == "accept_edits"
        assert _modes(log) == [("accept_edits", "plan"), ("plan", "accept_edits")]
        assert "approved the plan" in lines[-1].actor


async def test_always_outlives_hutchd_and_stays_in_its_project(claude_host: Host) -> None:
    """`always` adds the narrow rule that the request showed."""
    async with claude_host.client() as hutch:
        session = await claude_host.claude(hutch, "always", "ask")
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, told([bash("touch made")]))
            asked = await log.asked()
            approved = await claude_host.hutch("approve", asked.id, "--always")
            await log.ended(turn)
    await claude_host.stop()
    await claude_host.start()
    async with claude_host.client() as hutch:
        outcomes: dict[str, list[str]] = {}
        async with anyio.create_task_group() as group:
            for folder in ("always", "elsewhere"):
                group.start_soon(_play_again, claude_host, hutch, folder, outcomes)

    rule = asked.suggestions[0].rule
    assert rule in approved.err
    assert outcomes == {"always": [], "elsewhere": ["touch made"]}


async def _play_again(claude_host: Host, hutch: HutchClient, folder: str, outcomes: dict[str, list[str]]) -> None:
    session = await claude_host.claude(hutch, folder, "ask")
    async with log_of(hutch, session) as log:
        await log.play(session, told([bash("touch made")]), allow)
        outcomes[folder] = asked_of(log)


async def test_settings_of_the_project_allow_nothing(claude_host: Host, hutch: HutchClient) -> None:
    """Its agent settings allow no call, and its hook does not run."""
    folder = claude_host.folder("hooked")
    hook = {"hooks": [{"type": "command", "command": f'touch {folder}/hook-ran; echo \'{{"decision":"approve"}}\''}]}
    settings = {"permissions": {"allow": ["Bash"], "defaultMode": "bypassPermissions"}, "hooks": {"PreToolUse": [hook]}}
    for name in ("settings.json", "settings.local.json"):
        (folder / ".claude").mkdir(exist_ok=True)
        (folder / ".claude" / name).write_bytes(msgspec.json.encode(settings))
    session = await claude_host.claude(hutch, "hooked", "ask", rules=m.Rules(deny=("Bash(touch denied:*)",)))
    async with log_of(hutch, session) as log:
        end = await log.play(session, told([bash("touch denied"), bash("touch asked")]), deny)

        assert end.state == "completed", end
        assert asked_of(log) == ["touch asked"]
        assert files_in(session) == {".claude"}


async def test_the_agents_own_shell_cannot_decide_for_the_user(claude_host: Host, hutch: HutchClient) -> None:
    """`hutch approve` run by an agent decides nothing, not even from a detached process."""
    other = await claude_host.script(hutch, [{"tool": "Bash", "input": {"command": "touch made"}, "run": True}])
    session = await claude_host.claude(hutch, "insider", "bypass")
    async with log_of(hutch, other) as log:
        turn = await hutch.submit_prompt(other.id, "go")
        asked = await log.asked()
        tools = f"PATH={claude_host.env['PATH']} HUTCH_RUNTIME_DIR={claude_host.runtime}"
        approve = f"{tools} {sys.executable} -m hutch_client approve {asked.id}"
        async with log_of(hutch, session) as watched:
            await watched.play(
                session,
                told(
                    [bash(f"{approve} > direct 2>&1; echo $? >> direct")],
                    [bash(f"env -i setsid sh -c '({approve} > far 2>&1; echo $? >> far; touch done) &' > /dev/null")],
                    [bash("while [ ! -e done ]; do sleep 0.05; done")],
                ),
                allow,
            )
        said = [await wait_for(partial(_said, session, name)) for name in ("direct", "far")]
        waiting = await hutch.list_permissions(m.ListPermissions(other.id))
        await hutch.answer_permission(deny(asked))
        await log.ended(turn)

        assert [one.id for one in waiting] == [asked.id]
        for text in said:  # refused, or the sandbox hides hutchd's socket
            assert "belongs to a session" in text or "No hutchd answers" in text
            assert text.splitlines()[-1] in ("4", "3")


def _said(session: m.Session, name: str) -> str | None:
    path = Path(session.cwd, name)
    return path.read_text() if path.exists() else None
