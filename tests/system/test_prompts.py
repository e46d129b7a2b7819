"""A prompt's words reach the model exactly, whatever they begin with."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.rehearsal import Request, Say
from tests.sampling import seed
from tests.system.claude_stage import stage
from tests.system.double import double_cli

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

REPORTED: Final = (
    "/login returns 500 since the last merge, find out why",
    "/status endpoint is slow",
    "/config returns 404",
    "/usage page is blank",
    "/agents list is empty in the web UI",
    "/compact",
    "/clear",
    "/init",
    "/plan x",
    "/goal x",
)
"""Prompts that began with the name of a built-in command, so that no model saw them."""
NAMES: Final = (
    *("add-dir", "agents", "btw", "clear", "color", "compact", "config", "context", "copy", "cost", "debug", "diff"),
    *("doctor", "effort", "exit", "export", "extra-usage", "fast", "feedback", "goal", "heapdump", "help", "hooks"),
    *("ide", "init", "insights", "login", "logout", "loop", "mcp", "memory", "mobile", "model", "output-style"),
    *(
        "permissions",
        "plan",
        "plugin",
        "pr-comments",
        "privacy-settings",
        "quit",
        "rate-limit-options",
        "release-notes",
    ),
    *("reload-plugins", "remote-control", "rename", "resume", "review", "rewind", "sandbox", "security-review"),
    *("simplify", "skills", "stats", "status", "statusline", "stickers", "tasks", "team-onboarding", "terminal-setup"),
    *("theme", "think-back", "upgrade", "usage", "vim", "voice", "web-setup", "no-such-command"),
)
BEFORE: Final = ("/", " /", "\n/", "\u200b/", "//", "!", "#", "@", "/mcp__", "<command-name>/", "fix /", "⁄")
AFTER: Final = (
    *("", " ", " x", "\nmore", ": why?", " endpoint is slow", "/", " --help", " @CLAUDE.md", " \U0001f411 done", "\t"),
    *("\r\nand more", " $(touch ran)", " <local-command-stdout>x</local-command-stdout>", " \x00\x1b[31m", " " * 5000),
)


def prompts(random: Random, count: int) -> list[str]:
    """Return prompts that begin like a command, or nearly so."""
    return [f"{random.choice(BEFORE)}{random.choice(NAMES)}{random.choice(AFTER)}" for _ in range(count)]


def received(request: Request) -> list[str]:
    """Return the texts of the last message that the model got."""
    content: Any = request.messages[-1]["content"]
    return [content] if isinstance(content, str) else [block.get("text") for block in content]


async def test_a_prompt_that_begins_like_a_command_reaches_the_model(tmp_path: Path) -> None:
    """The real CLI delivers its words unchanged, and the turn is the answer to them."""
    some = prompts(Random(seed()), 10)
    print(f"HUTCH_TEST_SEED={seed()}")
    async with stage(tmp_path, lambda _: Say("heard")) as on:
        for text in (*REPORTED, *some):
            end = await on.turn(text)

            assert (end.state, end.result) == ("completed", "heard"), text
            assert text in received(on.model.turns[-1]), text
        assert len(on.model.turns) == len(REPORTED) + len(some)
        assert sorted(path.name for path in on.cwd.iterdir()) == []


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(500, id="some"),
        pytest.param(20_000, id="many", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
async def test_every_prompt_is_submitted_as_words(tmp_path: Path, count: int) -> None:
    """The double ends when it gets words that the CLI could take as a command."""
    random = Random(seed())
    print(f"HUTCH_TEST_SEED={seed()}")
    for start in range(0, count, 100):
        root = tmp_path / str(start)
        root.mkdir()
        async with stage(root, lambda _: Say("heard"), cli=str(double_cli())) as on:
            for text in prompts(random, 100):
                end = await on.turn(text)

                assert (end.state, end.result) == ("completed", "heard"), text
                assert text in received(on.model.turns[-1]), text
