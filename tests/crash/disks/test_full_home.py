"""A full disk under the agents' conversations: Claude Code reports success and stores nothing. The turn says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.disks.disk import fill, tmpfs
from tests.rehearsal import Model, Say, serve
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

SETTINGS = "[executors]\nspares = 0\n"
MORE = "and so on " * 1000
"""More than fits into the space that a transcript has allocated and not used."""


def agents(made: Host) -> Path:
    """Return the folder of the agents' directories."""
    folder = made.state / "spool" / "agents"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    return folder


def asked(model: Model, prompt: str) -> str:
    """Return what the model got with a prompt, as text."""
    return next(str(one.messages) for one in reversed(model.turns) if prompt in one.prompt)


async def test_a_turn_says_that_the_conversation_was_not_kept_and_the_next_one_knows_it() -> None:
    """The next prompt goes to a new conversation that begins with what Hutch recorded, also while the disk is full."""
    async with serve(key=KEY, script=lambda _: Say("noted")) as model, host(settings_for(model, SETTINGS)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        with tmpfs(agents(made), "16m"):
            async with made.client() as hutch:
                session = await made.claude(hutch, "work")
                async with log_of(hutch, session) as log:
                    ends = [await log.play(session, "apples are red")]
                    free = fill(agents(made))
                    ends.append(await log.play(session, f"pears are green {MORE}"))
                    shown = (await made.hutch("logs", session.id)).err
                    while_full = await log.play(session, f"plums are blue {MORE}")
                    free()
                    ends.append(await log.play(session, "what was red"))
                    ends.append(await log.play(session, "what was green"))
                    words = [notice.word for notice in log.of("notice")]
            await made.stop()

        assert [end.state for end in ends] == ["completed"] * 4, ends
        assert [end.conversation_kept for end in ends] == [True, False, True, True]
        assert "conversation_not_kept" in words
        assert "did not store the conversation" in ends[1].message
        assert "the conversation was not kept" in shown
        assert not while_full.conversation_kept or while_full.state == "failed"
        assert "apples are red" in asked(model, "what was red")
        assert "pears are green" in asked(model, "what was red")
        assert "<earlier-conversation>" in asked(model, "what was green")


@pytest.mark.full
async def test_a_full_home_elsewhere_costs_no_conversation() -> None:
    """The agent's conversation lies in Hutch's directory, so a home on another, full disk does not matter."""
    async with serve(key=KEY, script=lambda _: Say("noted")) as model, host(settings_for(model, SETTINGS)) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        with tmpfs(made.home, "16m"):
            fill(made.home)
            async with made.client() as hutch:
                session = await made.claude(hutch, "work")
                async with log_of(hutch, session) as log:
                    ends = [await log.play(session, "apples are red"), await log.play(session, "what was red")]
            await made.stop()

    assert [(end.state, end.conversation_kept) for end in ends] == [("completed", True)] * 2, ends
    assert "apples are red" in asked(model, "what was red")
