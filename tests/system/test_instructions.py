"""Instruction files from the project to the model, the record of the session, and `hutch inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model, Say, Step, Steps, anything
from tests.system.host import Host
from tests.system.log import log_of

pytestmark = pytest.mark.system


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


async def test_the_model_gets_the_instructions_and_the_user_sees_which(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """One event at the first start says what was given, and what was left out and why."""
    model.script = Steps(Step(anything, Say("ok"), None))
    folder = claude_host.folder("instructed")
    write(
        folder,
        {
            "CLAUDE.md": "MARK-ROOT\n@docs/style.md\n@AGENTS.md\n@docs/secret.md",
            "docs/secret.md": "MARK-SECRET\n",
            "docs/style.md": "MARK-IMPORTED-STYLE\n",
            "AGENTS.md": "MARK-AGENTS\n",
            ".claude/rules/r.md": "MARK-RULES\n",
            "sub/CLAUDE.md": "MARK-SUBDIR\n",
        },
    )
    write(claude_host.root, {"dotfiles/CLAUDE.md": "MARK-DOTFILES\n"})
    (claude_host.home / ".claude").mkdir(exist_ok=True)
    (claude_host.home / ".claude" / "CLAUDE.md").symlink_to("../../dotfiles/CLAUDE.md")
    session = await claude_host.claude(hutch, "instructed", rules=m.Rules(deny=("Read(docs/secret.md)",)))
    async with log_of(hutch, session) as log:
        await log.play(session, "go")
        asked = model.turns[-1].raw.decode()
        marks = ("ROOT", "IMPORTED-STYLE", "AGENTS", "RULES", "SUBDIR", "DOTFILES", "SECRET")
        seen = [mark for mark in marks if f"MARK-{mark}" in asked]
        (notice,) = [one for one in log.of("notice") if one.word == "instructions"]
        record = await hutch.get_session(session.id)
    shown = await claude_host.hutch("inspect", session.id)
    as_json = await claude_host.hutch("inspect", session.id, "-o", "json")
    (claude_host.home / ".claude" / "CLAUDE.md").unlink()

    assert seen == ["ROOT", "IMPORTED-STYLE", "AGENTS", "RULES"]
    assert record.instructions is not None
    given = [Path(file.path).name for file in record.instructions.given]
    assert given == ["CLAUDE.md", "style.md", "AGENTS.md", "r.md"]
    left_out = {file.path: file.why for file in record.instructions.left_out}
    assert set(left_out) == {
        f"{claude_host.home}/.claude/CLAUDE.md",
        f"{folder}/sub/CLAUDE.md",
        f"{folder}/docs/secret.md",
    }
    assert notice.message.startswith("The agent was given 4 instruction files. Not given: ")
    assert notice.details == as_json.json["instructions"]
    assert f"{folder}/docs/style.md (20 bytes)" in shown.out
    assert f"{folder}/sub/CLAUDE.md: it lies in a subfolder" in shown.out
