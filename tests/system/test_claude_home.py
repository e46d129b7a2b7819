"""The real CLI in its sandbox, in the home of a daily Claude user."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from hutch_executor.runners.claude.config_dir import transcripts_name
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from tests.programs import bubblewrap
from tests.rehearsal import Say, Step, Steps, Use, anything
from tests.sampling import sample
from tests.system.claude_stage import Stage, stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

Home = Literal["tools", "read_only", "hidden"]
SECRET = "private-to-this-person"
"""The content of each file that no agent may see."""


def command(script: str) -> Steps:
    """Return a model that runs a shell script and ends."""
    return Steps(("go", Use("Bash", {"command": script})), Step(anything, Say("done"), None))


def said(on: Stage) -> str:
    """Return the output of the session's commands."""
    return "\n".join(result.text for result in on.daemon.of("tool_result"))


def settle_in(home: Path, cwd: Path) -> None:
    """Write the files of a user's CLI, shell and tools into a home, and a project with hostile settings."""
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


@sample(2)
@pytest.mark.parametrize("home", ["tools", "read_only", "hidden"])
async def test_the_cli_sees_no_private_file_of_a_home_and_can_keep_its_conversations(
    tmp_path: Path, home: Home
) -> None:
    """Credentials, settings, hooks and servers of user and project are hidden. The CLI writes into the session's own
    directory, where the next CLI finds the conversation; the home stays as it was."""
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
    assert files_of(tmp_path / "home") == before
    assert [path.stem for path in (tmp_path / "agents" / "s-1").rglob("*.jsonl")] == [end.agent_session]


def files_of(home: Path) -> dict[Path, bytes]:
    """Return all files below a home, except those of a repository."""
    found = (path for path in home.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(home): path.read_bytes() for path in found}


@sample(2)
@pytest.mark.parametrize(
    "name", ["sp ace", "ünï-🐑", "new\nline", "q'uo\"te$x", "-dash", pytest.param("🐑" * 60, id="long")]
)
async def test_a_conversation_is_kept_for_any_directory_name(tmp_path: Path, name: str) -> None:
    """Hutch computes the name of the folder that the CLI uses."""
    spec, cwd = m.SandboxSpec(bubblewrap()), tmp_path / name
    async with stage(tmp_path, command("pwd > made"), sandbox=spec, cwd=cwd) as s:
        end = await s.turn()

    assert (cwd / "made").read_text() == f"{cwd}\n"
    kept = tmp_path / "agents" / "s-1" / "projects" / transcripts_name(str(cwd.resolve()))
    assert [path.stem for path in kept.glob("*.jsonl")] == [end.agent_session]


def refusing(root: Path, why: str, starts: str) -> m.SandboxSpec:
    """Return a sandbox by a bubblewrap that refuses these starts, a pattern for their numbers; trials count too."""
    program, counted = root / "bwrap", root / "counted"
    program.write_text(
        f"#!/bin/sh\necho >> {counted}\ncase $(wc -l < {counted}) in\n"
        f'  {starts}) echo "hutch: this command was not run: {why}." >&2; exit 126 ;;\n'
        f'esac\nexec {bubblewrap()} "$@"\n'
    )
    program.chmod(0o755)
    return m.SandboxSpec(str(program), network="full")


async def test_the_cli_starts_again_if_a_hidden_file_was_replaced_meanwhile(tmp_path: Path) -> None:
    """An account that is added between the trial and the start replaces /etc/shadow: the mount over it ends."""
    spec = refusing(tmp_path, "/etc/shadow can be seen in the sandbox", "2")
    async with stage(tmp_path, Steps(("go", Say("done"))), sandbox=spec) as s:
        end = await s.turn()

    assert end.state == "completed"


async def test_a_start_that_is_refused_from_inside_has_the_reason(tmp_path: Path) -> None:
    """What the sandbox says on standard error reaches the user; another reason is not tried again."""
    spec = refusing(tmp_path, "the sandbox has no seccomp filter", "2")
    with pytest.raises(HutchError, match="this command was not run: the sandbox has no seccomp filter"):
        async with stage(tmp_path, Steps(("go", Say("done"))), sandbox=spec):
            pass

    assert len((tmp_path / "counted").read_text()) == 2
