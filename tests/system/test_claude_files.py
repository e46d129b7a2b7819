"""The agent's own files with the real CLI: where they lie, what passes without a question, and losing them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hutch_client.client import HutchClient
from hutch_executor.runners.claude.config_dir import transcripts_name
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.programs import bubblewrap, required_program
from tests.rehearsal import Model, Reply, Request, Say, Step, Steps, Use, anything
from tests.system.claude_stage import stage
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import allow, executor_of, log_of, wait_for
from tests.system.policing import PLAN_FILE, asked_of, obey, results_of, told

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

OK = Step(anything, Say("ok"), None)
ID = "11111111-1111-4111-8111-111111111111"


@pytest.mark.parametrize(
    ("sandboxed", "shell"), [(False, "bash"), (True, "bash"), pytest.param(False, "zsh", marks=pytest.mark.full)]
)
async def test_the_cli_keeps_its_files_in_the_sessions_directory(
    tmp_path: Path, sandboxed: bool, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes nothing into the home or /tmp, keeps no notes of its own, and has no socket for messages.

    A process that can reach such a socket can send the model messages, and start turns while the agent is idle. The
    agent's commands have the account's runtime directory nevertheless, if they have no sandbox.
    """
    look = "env | grep -c -e MESSAGING_SOCKET=/ -e MESSAGING_TOKEN=.; echo dir $XDG_RUNTIME_DIR"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SHELL", required_program(shell))
    script = Steps(("go", Use("Bash", {"command": look})), OK)
    spec = m.SandboxSpec(bubblewrap()) if sandboxed else None
    async with stage(tmp_path, script, sandbox=spec) as s:
        (s.home / ".claude").mkdir()
        (s.home / ".claude" / "settings.json").write_text("{}")
        end = await s.turn()
        scratch = tmp_path / "agents" / "s-1" / "hutch-scratch"
        stored = [path.name for path in scratch.iterdir()] if scratch.exists() else []
        natives = b"\n".join(native for _, _, native in s.daemon.events if native is not None)
        (seen,) = [result.text for result in s.daemon.of("tool_result")]
        asked = s.model.turns[0].raw.decode()

    assert end.state == "completed"
    assert b'"subtype":"init"' in natives
    assert not re.search(rb'"messaging_socket_path":"[^"]', natives)
    assert seen.split() == ["0", "dir", *([] if sandboxed else [str(tmp_path)])]
    assert not (tmp_path / "cc-socks").exists()
    assert (stored, scratch.exists()) == ([] if sandboxed else [f"claude-{os.getuid()}"], False)
    assert "/memory/" not in asked
    assert [path.name for path in (tmp_path / "home").rglob("*")] == [".claude", "settings.json"]
    (transcript,) = (tmp_path / "agents" / "s-1").rglob("*.jsonl")
    assert transcript.stem == end.agent_session


@pytest.mark.parametrize("others", [(), (".config.json",)], ids=["now", "formerly"])
async def test_the_cli_obeys_nothing_that_the_agent_left_in_its_directory(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    """Settings, hooks, servers, variables, instructions, notes and plugins there are neither loaded nor run.

    The CLI's own state has two names; of both the former one counts.
    """
    config, ran = tmp_path / "agents" / "s-1", tmp_path / "ran"
    ran.mkdir()
    run = {"hooks": [{"type": "command", "command": f"touch {ran}/hook"}]}
    settings = {
        "hooks": {name: [run] for name in ("SessionStart", "PreToolUse", "UserPromptSubmit", "Stop")},
        "env": {"PLANTED": "1", "BASH_ENV": f"{tmp_path}/env.sh"},
        "apiKeyHelper": f"touch {ran}/helper; echo key",
        "statusLine": {"type": "command", "command": f"touch {ran}/status"},
        "outputStyle": "planted",
    }
    (tmp_path / "env.sh").write_text(f"touch {ran}/env\n")
    servers = {"mcpServers": {"planted": {"command": "touch", "args": [f"{ran}/server"]}}}
    work = str(tmp_path / "work")
    plugin = "plugins/store/planted/.claude-plugin/plugin.json"
    files = {
        "settings.json": json.dumps(settings),
        "settings.local.json": json.dumps(settings),
        "managed-settings.json": json.dumps(settings),
        "remote-settings.json": json.dumps(settings),
        ".claude.json": json.dumps(
            {**servers, "projects": {work: servers}, "hooks": settings["hooks"], "env": settings["env"]}
        ),
        **{name: json.dumps({"env": settings["env"]}) for name in others},
        "CLAUDE.md": "MARK-PLANTED",
        "rules/x.md": "MARK-PLANTED",
        "agents/x.md": "---\nname: x\ndescription: MARK-PLANTED\n---\nMARK-PLANTED",
        "skills/x/SKILL.md": "---\nname: x\ndescription: MARK-PLANTED\n---\nMARK-PLANTED",
        "output-styles/planted.md": "---\nname: planted\n---\nMARK-PLANTED",
        plugin: json.dumps({"name": "planted", **servers, "hooks": settings["hooks"]}),
        f"projects/{transcripts_name(work)}/memory/MEMORY.md": "MARK-PLANTED",
    }
    async with stage(tmp_path, Steps(OK)) as s:
        first = await s.turn()
    for name, text in files.items():
        (config / name).parent.mkdir(parents=True, exist_ok=True)
        (config / name).write_text(text)
    script = Steps(("go", Use("Bash", {"command": "env"})), OK)
    async with stage(tmp_path, script, resume=first.agent_session) as s:
        end = await s.turn("go")
        (env,) = [result.text for result in s.daemon.of("tool_result")]
        asked = b"".join(request.raw for request in s.model.requests)

    assert end.state == "completed", end
    assert list(ran.iterdir()) == []
    assert "PLANTED" not in env
    assert b"MARK-PLANTED" not in asked


async def test_a_fork_continues_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """It gets a copy of its parent's transcript; the parent's stays as it was."""
    parent, child = tmp_path / "agents" / "parent", tmp_path / "agents" / "child"
    async with stage(tmp_path, Steps(OK), agent_dir=parent) as s:
        first = await s.turn("remember the sheep")
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    given: dict[str, Any] = {"resume": first.agent_session, "resume_from": (str(parent),), "fork": True}
    async with stage(tmp_path, Steps(OK), agent_dir=child, **given) as s:
        end = await s.turn()
        asked = str(s.model.turns[0].messages)

    assert end.agent_session not in (None, first.agent_session)
    assert "remember the sheep" in asked
    assert {path: path.read_bytes() for path in before} == before
    assert end.agent_session in {path.stem for path in child.rglob("*.jsonl")}


@pytest.mark.parametrize("alive", [True, False], ids=["the executor lives", "a new executor"])
async def test_a_lost_conversation_begins_anew_once(tmp_path: Path, alive: bool) -> None:
    """The turn says so and completes; the next one goes on with the new conversation."""

    def lose() -> None:
        for path in (tmp_path / "agents").rglob("*.jsonl"):
            path.unlink()

    async with stage(tmp_path, Steps(OK)) as s:
        first = await s.turn("first")
        if alive:
            lose()
            assert s.runner.connection is not None
            s.runner.connection.process.kill()
            await s.runner.connection.process.exit_code()
            ends = [await s.turn("second"), await s.turn("third")]
            notices, turns = s.daemon.notices(), s.model.turns[1:]
    if not alive:
        lose()
        async with stage(tmp_path, Steps(OK), resume=first.agent_session) as s:
            ends = [await s.turn("second"), await s.turn("third")]
            notices, turns = s.daemon.notices(), s.model.turns

    assert [end.state for end in ends] == ["completed", "completed"], (ends, notices)
    assert ends[0].agent_session == ends[1].agent_session != first.agent_session
    assert notices.count("conversation_lost") == 1
    assert "first" not in str(turns[0].messages)
    assert "second" in str(turns[1].messages)


@pytest.mark.parametrize("content", [b"", b"not a transcript\n"], ids=["empty", "damaged"])
async def test_a_damaged_conversation_begins_anew(tmp_path: Path, content: bytes) -> None:
    """The CLI itself finds that there is nothing to resume."""
    async with stage(tmp_path, Steps(OK)) as s:
        first = await s.turn("first")
    (transcript,) = (tmp_path / "agents").rglob("*.jsonl")
    transcript.write_bytes(content)
    async with stage(tmp_path, Steps(OK), resume=first.agent_session) as s:
        end = await s.turn("second")

        assert end.state == "completed", end
        assert "conversation_lost" in s.daemon.notices()


async def test_a_conversation_that_the_user_named_must_exist(tmp_path: Path) -> None:
    """The user asked for exactly this one, so that none begins in its place."""
    with pytest.raises(HutchError) as caught:
        async with stage(tmp_path, Steps(OK), resume=ID, resume_named=True):
            pass

    assert caught.value.reason is Reason.NOT_FOUND
    assert caught.value.details["word"] == "resume_unknown"


# ---------------------------------------------------------------- with hutchd


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host with a key and the real CLI."""
    async with host(settings_for(model)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


def overflow(request: Request) -> Reply:
    """A model that makes a long result, and reads the file that it was stored in."""
    if not request.results:
        return Use("Bash", {"command": "seq 1 60000"})
    if len(request.results) == 1:
        found = re.search(r"(/\S+/tool-results/\S+\.txt)", request.results[0].text)
        assert found, request.results[0].text[:500]
        return Use("Read", {"file_path": found[1], "offset": 59990, "limit": 5})
    return Say("done")


@pytest.mark.parametrize("mode", ["ask", "unattended"])
async def test_the_agent_reads_its_own_long_result(
    claude_host: Host, hutch: HutchClient, model: Model, mode: m.PermissionMode
) -> None:
    """Nobody is asked. `explain` decides alike; it asks about another session's result."""
    model.script = overflow
    session = await claude_host.claude(hutch, f"long-{mode}", mode, rules=m.Rules(allow=("Bash(seq:*)",)))
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")

        assert end.state == "completed", end
        assert asked_of(log) == []
        assert "59990" in log.of("tool_result")[1].text
        call = log.of("tool_call")[1]
    path = call.call["input"]["file_path"] if isinstance(call.call, dict) else call.call.input["file_path"]
    explained = await hutch.call("explain_policy", m.ExplainPolicy("Read", {"file_path": path}, session=session.id))
    other = await hutch.call(
        "explain_policy",
        m.ExplainPolicy("Read", {"file_path": path.replace(session.id, "s-other")}, session=session.id),
    )

    assert (explained.decision, other.decision) == ("allow", "deny" if mode == "unattended" else "ask")


async def test_a_plan_is_asked_about_once(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The agent writes its plan's file in the mode `plan`, and the request shows the plan's text."""
    model.script = obey
    session = await claude_host.claude(hutch, "plans", "plan")
    calls = told([("Write", {"file_path": PLAN_FILE, "content": "# plan\n"})], [("ExitPlanMode", {})])
    async with log_of(hutch, session) as log:
        end = await log.play(session, calls, allow)

        asked = [one.permission for one in log.of("permission_asked")]
        assert end.state == "completed", end
        assert [(one["kind"], one.get("plan", "").strip()) for one in asked] == [("plan", "# plan")]
        assert all(results_of(log).values())


async def test_a_removed_session_leaves_no_files(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """`hutch rm` removes the agent's directory too."""
    model.script = Steps(OK)
    session = await claude_host.claude(hutch, "removed")
    async with log_of(hutch, session) as log:
        await log.play(session, "go")
    directory = claude_host.state / "spool" / "agents" / session.id
    assert list(directory.rglob("*.jsonl"))
    await hutch.close_session(session.id, force=True)
    assert directory.is_dir()

    await hutch.call("delete_session", m.SessionRef(session.id))

    await wait_for(lambda: not directory.exists())


async def test_a_session_whose_conversation_is_gone_goes_on(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """Its next executor begins another conversation, once; the notice belongs to the turn."""
    model.script = Steps(OK)
    session = await claude_host.claude(hutch, "gone")
    async with log_of(hutch, session) as log:
        await log.play(session, "first")
        os.kill(await executor_of(hutch, session), signal.SIGKILL)
        for path in (claude_host.state / "spool" / "agents" / session.id).rglob("*.jsonl"):
            path.unlink()
        ends = [await log.play(session, "second"), await log.play(session, "third")]
        asked = str(model.turns[-2].messages)
        lost = [event.turn for event in log.events if b'"conversation_lost"' in bytes(event.data)]
        turns = [event.turn for event in log.events if event.kind == "turn_ended"]

    assert [end.state for end in ends] == ["completed", "completed"]
    assert lost == [turns[1]]
    assert "first" not in asked


async def test_the_user_continues_a_conversation_of_their_own(
    claude_host: Host, hutch: HutchClient, model: Model, tmp_path: Path
) -> None:
    """It is copied from `~/.claude`, which stays as it was; the session resumes it after hutchd is started again."""
    model.script = Steps(OK)
    async with stage(tmp_path, Steps(OK), cwd=claude_host.folder("users")) as s:
        first = await s.turn("remember the sheep")
    users = claude_host.home / ".claude"
    shutil.copytree(tmp_path / "agents" / "s-1" / "projects", users / "projects")
    before = {path: path.read_bytes() for path in users.rglob("*") if path.is_file()}
    session = await claude_host.claude(hutch, "users", resume=first.agent_session)
    async with log_of(hutch, session) as log:
        end = await log.play(session, "and")

        assert end.state == "completed", end
        assert "remember the sheep" in str(model.turns[-1].messages)
        assert end.agent_session == first.agent_session
    assert {path: path.read_bytes() for path in users.rglob("*") if path.is_file()} == before
