"""The real CLI in its sandbox, in the home of somebody who uses it every day."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from hutch_executor.runners.claude.launch import transcripts_name
from hutch_shared import messages as m
from tests.programs import bubblewrap
from tests.rehearsal import Say, Step, Steps, Use, anything
from tests.system.claude_stage import Stage, stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

Home = Literal["tools", "read_only", "hidden"]
SECRET = "private-to-this-person"
"""What is in every file that no agent is to see."""


def command(script: str) -> Steps:
    """Return a model that runs a shell script and is done."""
    return Steps(("go", Use("Bash", {"command": script})), Step(anything, Say("done"), None))


def said(on: Stage) -> str:
    """Return what the commands of the session said."""
    return "\n".join(result.text for result in on.daemon.of("tool_result"))


def settle_in(home: Path, cwd: Path) -> None:
    """Write what a person's CLI, shell and tools keep in a home, and a project that would run what nobody asked for."""
    run = {"hooks": [{"type": "command", "command": f"touch {cwd}/HOOK"}]}
    hooks = {"hooks": {"SessionStart": [run], "PreToolUse": [run]}, "env": {"SET": "by settings"}}
    servers = {"mcpServers": {"one": {"command": "touch", "args": [f"{cwd}/SERVER"]}}}
    files = {
        ".claude.json": json.dumps({"oauthAccount": {"name": SECRET}, **servers}),
        ".claude/.credentials.json": json.dumps({"claudeAiOauth": {"accessToken": SECRET, "expiresAt": 4e12}}),
        ".claude/settings.json": json.dumps({**hooks, "apiKeyHelper": f"touch {cwd}/HELPER; echo {SECRET}"}),
        ".claude/agents/spy.md": f"---\nname: spy\ndescription: {SECRET}\n---\n",
        ".claude/projects/-other/1.jsonl": SECRET,
        ".ssh/id_ed25519": SECRET,
        ".netrc": SECRET,
        ".npmrc": SECRET,
        ".aws/credentials": SECRET,
        ".git-credentials": f"https://ada:{SECRET}@example.org\n",
        ".gitconfig": "[include]\npath = .gitconfig-work\n[credential]\nhelper = store\n",
        ".gitconfig-work": "[user]\nname = Ada\nemail = a@a\n[commit]\ngpgSign = true\n",
        ".profile": f"export API_PASSWORD={SECRET}\n",
        ".bashrc": f"export API_PASSWORD={SECRET}\n",
        "notes": "seen where the home is",
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    cwd.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=cwd, check=True)
    (cwd / ".claude").mkdir()
    (cwd / ".claude" / "settings.json").write_text(json.dumps(hooks))
    (cwd / ".mcp.json").write_text(json.dumps(servers))


@pytest.mark.parametrize("home", ["tools", "read_only", "hidden"])
async def test_nothing_of_a_lived_in_home_is_seen_or_run_and_the_cli_finds_its_place(
    tmp_path: Path, home: Home
) -> None:
    """No credentials, settings, hooks or servers of the person or of the project. The CLI can write its settings (it
    tries for seconds where it cannot); a conversation is kept for the next CLI, and nothing else that is written there.
    """
    spec = m.SandboxSpec(bubblewrap(), home=home)
    cwd = tmp_path / "home" / "project"
    settle_in(tmp_path / "home", cwd)
    before = files_of(tmp_path / "home")
    look = (
        "grep -rls private-to ~ --exclude-dir=projects; env | grep -e private-to -e by.settings;"
        " touch ~/.x ~/.claude/x 2>/dev/null; git commit -q --allow-empty -m one && git log --format='BY %an';"
        ' printf "protocol=https\\nhost=example.org\\n\\n" | GIT_TERMINAL_PROMPT=0 git credential fill;'
        ' [ -s "$CLAUDE_CONFIG_DIR/.claude.json" ] && echo SETTINGS; ls ~/notes'
    )
    async with stage(tmp_path, command(look), sandbox=spec, cwd=cwd) as s:
        end = await s.turn()
        looked = said(s)
        asked = json.dumps([turn.messages for turn in s.model.turns])
    async with stage(tmp_path, command(""), sandbox=spec, cwd=cwd, resume=end.agent_session) as s:
        again = await s.turn("and")
        told = s.model.turns[0].messages

    notes = [f"{tmp_path}/home/notes"] if home == "read_only" else []
    assert (end.state, again.state) == ("completed", "completed")
    assert again.agent_session == end.agent_session
    assert len(told) > 3
    assert "SETTINGS" in looked.splitlines()
    assert SECRET not in looked
    assert SECRET not in asked
    assert [line for line in looked.splitlines() if line.startswith(str(tmp_path))] == notes
    assert "by settings" not in looked
    assert ("BY Ada" in looked) == (home != "hidden")
    assert sorted(os.listdir(cwd)) == [".claude", ".git", ".mcp.json"]
    new = {path for path, text in files_of(tmp_path / "home").items() if before.get(path) != text}
    assert {path.parts[2] for path in new} == {transcripts_name(str(cwd.resolve()))}


def files_of(home: Path) -> dict[Path, bytes]:
    """Return all files below a home, but for those of a repository."""
    found = (path for path in home.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(home): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    "name", ["sp ace", "ünï-🐑", "new\nline", "q'uo\"te$x", "-dash", pytest.param("🐑" * 60, id="long")]
)
async def test_a_conversation_is_kept_whatever_the_directory_is_called(tmp_path: Path, name: str) -> None:
    """The folder that the sandbox shows of the CLI's own is the one that the CLI uses."""
    spec, cwd = m.SandboxSpec(bubblewrap()), tmp_path / name
    async with stage(tmp_path, command("pwd > made"), sandbox=spec, cwd=cwd) as s:
        end = await s.turn()

    assert (cwd / "made").read_text() == f"{cwd}\n"
    kept = tmp_path / "home" / ".claude" / "projects" / transcripts_name(str(cwd.resolve()))
    assert [path.stem for path in kept.glob("*.jsonl")] == [end.agent_session]
