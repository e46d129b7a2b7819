"""The CLI's arguments and environment, and decisions in the CLI's form."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import claude_agent_sdk
import pytest

from hutch_executor.runners.claude.calls import judged_input, kind_of, plan_of
from hutch_executor.runners.claude.config_dir import transcripts_name
from hutch_executor.runners.claude.launch import build, sandboxed
from hutch_executor.runners.claude.spawn import Launch
from hutch_executor.sandbox.command import SessionSandbox
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from tests.programs import bubblewrap


def launch(options: m.AgentOptions | None = None, text: str = "", **environ: str) -> Launch:
    session = m.PrepareSession(
        "s-1", "claude", "/proj", "ask", options or m.AgentOptions(), m.Limits(max_turns=3), "/spool", "/home/ada"
    )
    grant = m.KeyGrant("lease", "the-lease", base_url="http://127.0.0.1:9")
    return build(
        session, grant, ("--session-id=x",), text, cli="/cli", config="/own", retries=2, stream_idle=60, environ=environ
    )


def test_the_environment_is_built_from_a_list() -> None:
    """Only listed variables reach the agent, and no secret does."""
    started = launch(
        PATH="/bin", HOME="/root", LC_ALL="C", ANTHROPIC_API_KEY="leak", CLAUDE_CONFIG_DIR="/x", AWS_KEY="y"
    )

    assert {"PATH", "LC_ALL"} <= set(started.env)
    assert not {"ANTHROPIC_API_KEY", "AWS_KEY"} & set(started.env)
    assert started.env["CLAUDE_CONFIG_DIR"] == "/own"
    assert started.env["HOME"] == "/home/ada"
    assert started.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert "the-lease" not in str((started.argv, started.env, repr(started)))
    assert started.in_variables["CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR"].reveal() == "the-lease"


def test_the_options_of_a_session_reach_the_command_line() -> None:
    """Documents that are long or may hold secrets are passed through pipes."""
    mcp = {"db": {"command": "db", "env": {"TOKEN": "t"}}}
    options = m.AgentOptions("opus", "Be brief.", ("Read",), ("WebFetch",), mcp)
    started = launch(options, "Instructions")

    assert {"--model=opus", "--max-turns=3", "--allowedTools=Read", "--session-id=x"} <= set(started.argv)
    assert any(word.startswith("--disallowedTools=") and word.endswith(",WebFetch") for word in started.argv)
    documents = {flag: secret.reveal() for flag, secret in started.after_flags.items()}
    assert json.loads(documents.pop("--mcp-config")) == {"mcpServers": mcp}
    assert documents == {"--system-prompt-file": "Be brief.", "--append-system-prompt-file": "Instructions"}


def test_a_lease_is_used_at_the_brokers_socket() -> None:
    """The host in the base URL of a lease does not exist."""
    session = m.PrepareSession("s-1", "claude", "/proj", "ask", m.AgentOptions(), m.Limits(), "/spool", "/home/ada")
    grant = m.KeyGrant("lease", "l", base_url="http://broker.invalid", unix_socket="/run/hutch/broker/broker.sock")
    started = build(session, grant, (), "", cli="/cli", config="/own", retries=2, stream_idle=60, environ={})

    assert started.env["ANTHROPIC_UNIX_SOCKET"] == "/run/hutch/broker/broker.sock"
    assert started.env["ANTHROPIC_BASE_URL"] == "http://broker.invalid"


def test_the_cli_is_started_in_the_sandbox_of_its_session(tmp_path: Path) -> None:
    """Of Hutch it sees only the session's own directory and the broker's. It has no socket for messages."""
    cwd, home, broker, own = tmp_path / "work", tmp_path / "home", tmp_path / "run" / "broker", tmp_path / "run" / "own"
    for folder in (cwd, home, broker, own):
        folder.mkdir(parents=True)
    program = bubblewrap()
    spec = m.SandboxSpec(program, hide=(str(tmp_path / "run"),))
    session = m.PrepareSession(
        "s-1", "claude", str(cwd), "ask", m.AgentOptions(), m.Limits(), "/spool", str(home), sandbox=spec
    )
    grant = m.KeyGrant("lease", "l", unix_socket=str(broker / "broker.sock"))
    env = {"TMPDIR": "/var/x", "XDG_RUNTIME_DIR": "/run/user/1", "LANG": "C", "CLAUDE_CONFIG_DIR": str(own)}
    bare = Launch(("/cli", "--word"), str(cwd), env)
    started, _ = sandboxed(bare, session, grant, SessionSandbox(session, spec))
    words = started.argv

    assert words[0] == program
    assert words[-2:] == ("/cli", "--word")
    assert _pairs(words, "--bind") == {str(cwd), str(own)}
    assert str(broker) in _pairs(words, "--ro-bind")
    taken = {words[at + 2] for at, word in enumerate(words) if word == "--ro-bind" and words[at + 1] != words[at + 2]}
    assert {"/tmp/cc-socks-0", f"/tmp/cc-socks-{os.getuid()}"} <= taken
    settings = {name for name in started.env if name.startswith("GIT_CONFIG_")}
    assert {name: value for name, value in started.env.items() if name not in settings} == {
        "LANG": "C", "CLAUDE_CONFIG_DIR": str(own), "XDG_RUNTIME_DIR": "/proc"
    }  # fmt: skip


def test_git_ignores_a_folder_that_only_looks_like_a_repository(tmp_path: Path) -> None:
    """Such a folder's settings name programs that a harmless git command would run. Real repositories still work."""
    bait, real = tmp_path / "bait", tmp_path / "real"
    subprocess.run(["git", "init", "-q", "--bare", bait], check=True)
    subprocess.run(["git", "init", "-q", real], check=True)
    env = {**launch(PATH=os.environ["PATH"]).env, "HOME": str(tmp_path)}
    found = [
        subprocess.run(["git", "rev-parse", "--git-dir"], cwd=cwd, env=env, capture_output=True, check=False)
        for cwd in (bait, real)
    ]

    assert [one.returncode for one in found] == [128, 0]


def test_a_direct_key_is_refused_if_only_the_broker_is_reachable(tmp_path: Path) -> None:
    """The session is refused at once; otherwise the agent would retry for a long time."""
    spec = m.SandboxSpec("/usr/bin/bwrap", network="broker-only")
    session = m.PrepareSession(
        *("s-1", "claude", str(tmp_path), "ask", m.AgentOptions(), m.Limits(), "/spool", "/home/ada"), sandbox=spec
    )
    with pytest.raises(HutchError, match="broker-only") as refused:
        sandboxed(Launch(("/cli",), "/proj", {}), session, m.KeyGrant("direct", "k"), SessionSandbox(session, spec))

    assert refused.value.reason is Reason.AGENT_UNAVAILABLE


@pytest.mark.parametrize(
    "cwd", ["/a/b c", "/a.b_c", "/ü/é", "/new\nline", "/" + "x" * 300, *(f"/{'é' * n}" for n in (198, 199, 200))]
)
def test_the_transcript_folder_has_the_clis_name(cwd: str) -> None:
    """For characters of one UTF-16 unit the name is the same as the SDK's."""
    assert transcripts_name(cwd) == claude_agent_sdk.project_key_for_directory(cwd)


def test_a_character_of_two_utf16_units_counts_twice() -> None:
    """The SDK counts it once."""
    assert transcripts_name("/sheep/🐑") == "-sheep---"


def _pairs(words: tuple[str, ...], word: str) -> set[str]:
    return {words[at + 1] for at, one in enumerate(words) if one == word}


def decided(tool: str, given: dict[str, Any], **fields: Any) -> m.PermissionDecision:
    whole = {"decision": "allow", "state": "allowed", "digest": input_digest(tool, given)} | fields
    return m.PermissionDecision(input=given, **whole)


@pytest.mark.parametrize(
    "fields",
    [
        {"decision": "deny", "state": "denied"},
        {"state": "expired"},
        {"state": "withdrawn"},
        {"state": "pending"},
        {"digest": "0" * 64},
    ],
)
def test_only_an_allowing_decision_on_this_input_lets_it_run(fields: dict[str, Any]) -> None:
    """A denial, an expiry and the digest of another input allow nothing."""
    given = {"command": "ls"}

    assert judged_input("Bash", decided("Bash", given)) == given
    assert judged_input("Bash", decided("Bash", given, **fields)) is None


def test_answers_go_back_by_question() -> None:
    """Several labels become one text. Unless each question has an answer by its text, the call is not allowed."""
    given = {"questions": [{"question": "Which?", "header": "W"}, {"question": "Many?", "header": "M"}]}
    answered = decided(
        "AskUserQuestion", given, state="answered", decision="answer", answers={"Which?": "B", "Many?": ["C", "D"]}
    )

    assert judged_input("AskUserQuestion", answered) == {**given, "answers": {"Which?": "B", "Many?": "C, D"}}
    assert judged_input("AskUserQuestion", decided("AskUserQuestion", given)) is None


def test_questions_and_plans_are_not_tools() -> None:
    """They become permission requests of their own kinds."""
    assert [kind_of(tool) for tool in ("Bash", "AskUserQuestion", "ExitPlanMode")] == ["tool", "question", "plan"]
    assert plan_of({"plan": "# Do"}) == "# Do"
    assert plan_of({"plan": 3}) == plan_of({}) != ""
