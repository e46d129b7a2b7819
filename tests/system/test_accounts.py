"""Executors under other accounts on a shared host: the parts that survive the death of each other part."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.accounts import Account, processes_of
from tests.fakes.stage import until
from tests.system.shared_host import SharedHost, shared_host

pytestmark = pytest.mark.system


async def begin(host: SharedHost, who: Account, lines: Sequence[Mapping[str, Any]], *more: str) -> str:
    """Start a script in a new session; return the session's id."""
    script = host.script(who, lines)
    words: list[str | Path] = [
        "run",
        "-d",
        "--agent",
        "script",
        "--script",
        script,
        "--mode",
        "bypass",
        "-C",
        host.folder(who, "work"),
    ]
    return (await host.hutch(who, *words, *more, "go")).out.strip()


async def session(host: SharedHost, who: Account, ref: str) -> dict[str, Any]:
    """Return a session."""
    found: dict[str, Any] = (await host.hutch(who, "inspect", ref, "-o", "json")).json
    return found


async def events(host: SharedHost, who: Account, ref: str) -> list[dict[str, Any]]:
    """Return all events of a session."""
    done = await host.hutch(who, "logs", ref, "-o", "jsonl")
    return [json.loads(line) for line in done.out.splitlines()]


async def said(host: SharedHost, who: Account, ref: str, text: str) -> None:
    """Wait until a session has output something."""
    with anyio.fail_after(60):
        while text not in str(await events(host, who, ref)):
            await anyio.sleep(0.05)


def executors_of(host: SharedHost, who: Account) -> list[int]:
    """Return the executor processes of a user."""
    return [pid for pid in processes_of(who.uid) if b"hutch_executor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_session_outlives_hutchd_and_the_launcher() -> None:
    """Both are killed during a turn: the turn goes on, and a new launcher can end processes that it did not start."""
    async with shared_host("alice") as host:
        alice = host.people["alice"]
        flag = alice.home / "work" / "go-on"
        lines = [{"text": "before"}, {"wait_file": str(flag)}, {"text": "after"}]
        ref = await begin(host, alice, lines)
        await said(host, alice, ref, "before")
        (executor,) = executors_of(host, alice)
        await host.end(host.launcher, signal.SIGKILL)
        await host.end(host.daemon, signal.SIGKILL)
        await host.start_launcher()
        await host.start()
        assert executors_of(host, alice) == [executor]
        flag.touch()
        await host.hutch(alice, "wait", ref)
        texts = [one["data"]["text"] for one in await events(host, alice, ref) if one["kind"] == "text"]
        assert texts == ["before", "after"]
        await host.hutch(alice, "stop", ref)
        assert processes_of(alice.uid) == []


async def test_without_the_launcher_nothing_starts_and_the_reason_is_shown() -> None:
    """Running executors go on. An executor whose end cannot be verified is quarantined until the launcher is back."""
    async with shared_host("alice", "bob", settings="[turns]\ninterrupt_grace = 1.0\n") as host:
        alice, bob = host.people["alice"], host.people["bob"]
        ref = await begin(host, alice, [{"tool": "Bash", "input": {"command": "sleep 600"}, "run": True}])
        await until(lambda: len(processes_of(alice.uid)) >= 2)
        await host.end(host.launcher, signal.SIGKILL)
        refused = await host.hutch(bob, "run", "--agent", "script", "hello", code=None)
        assert refused.code != 0
        assert "hutch-launcher cannot be reached" in refused.err
        assert processes_of(bob.uid) == []
        status = (await host.hutch(bob, "status", "-o", "json")).json
        assert status["isolation"]["level"] == "reduced"
        assert "hutch-launcher cannot be reached" in status["isolation"]["missing"]
        (executor,) = executors_of(host, alice)
        os.kill(executor, signal.SIGSTOP)  # a stopped executor cannot end by itself
        await host.hutch(alice, "stop", "--force", ref, code=None)
        assert executor in processes_of(alice.uid)
        notices = (await host.hutch(host.hutch_account, "status", "-o", "json")).json["notices"]
        assert "could not be ended" in str(notices)
        await host.start_launcher()
        with anyio.fail_after(30):
            while processes_of(alice.uid):
                await anyio.sleep(0.05)
        assert [one["data"]["text"] for one in await host.play(bob, [{"text": "here"}]) if one["kind"] == "text"] == [
            "here"
        ]


async def test_the_next_executor_hands_in_the_events_of_a_dead_one() -> None:
    """Only the account can read the spool; every event is stored, and the spool is removed."""
    async with shared_host("alice") as host:
        alice = host.people["alice"]
        flag = host.folder(alice, "work") / "go-on"
        lines: list[dict[str, Any]] = [
            {"text": "before"},
            {"wait_file": str(flag)},
            {"repeat": {"times": 50, "line": {"text": "while hutchd is away"}}},
            {"wait_file": str(flag.with_name("never"))},
        ]
        ref = await begin(host, alice, lines)
        await said(host, alice, ref, "before")
        (executor,) = executors_of(host, alice)
        await host.end(host.daemon, signal.SIGKILL)
        flag.touch()
        spools = host.spool / str(alice.uid)
        with anyio.fail_after(30):
            while sum(path.stat().st_size for path in spools.rglob("*") if path.is_file()) < 50 * 40:
                await anyio.sleep(0.05)
        await anyio.sleep(0.5)
        (left,) = spools.iterdir()
        assert spools.stat().st_uid == alice.uid
        assert spools.stat().st_mode & 0o777 == 0o700
        os.kill(executor, signal.SIGKILL)
        await host.start()
        await host.play(alice, [{"text": "another session of hers"}])
        with anyio.fail_after(30):
            while str(await events(host, alice, ref)).count("while hutchd is away") < 50:
                await anyio.sleep(0.1)
        assert [one["seq"] for one in await events(host, alice, ref)] == list(
            range(1, len(await events(host, alice, ref)) + 1)
        )
        with anyio.fail_after(30):
            while left.exists():
                await anyio.sleep(0.1)


async def test_a_new_group_membership_applies_to_the_next_executor() -> None:
    """Neither hutchd nor the launcher needs a restart."""
    from tests.accounts import group, join

    async with shared_host("alice") as host:
        alice = host.people["alice"]
        assert "extra" not in await host.shell(alice, "id -Gn")
        with group("extra") as extra:
            join(alice, extra)
            assert extra in await host.shell(alice, "id -Gn")


async def test_a_user_may_run_agents_as_another_account_if_the_settings_say_so() -> None:
    """`--account` works for users that the settings name: the session is the user's, its processes are the
    account's."""
    async with shared_host("alice", "bob", "tool", start=False) as host:
        alice, bob, tool = (host.people[name] for name in ("alice", "bob", "tool"))
        host.settings = f'[accounts.run_as]\n"{alice.name}" = ["{tool.name}"]\n'
        await host.start_launcher()
        await host.start()
        work = host.root / "shared"
        work.mkdir(mode=0o755)
        words: list[str | Path] = [
            "run",
            "--agent",
            "script",
            "--mode",
            "bypass",
            "-C",
            work,
            "-o",
            "jsonl",
            "--account",
            tool.name,
        ]
        prompt = json.dumps({"tool": "Bash", "input": {"command": "id -un"}, "run": True})
        done = await host.hutch(alice, *words, prompt)
        assert f"{tool.name}\\n" in done.out
        refused = await host.hutch(bob, *words, prompt, code=None)
        assert refused.code != 0
        assert "may not run agents as" in refused.err
        shown = (await host.hutch(alice, "ps", "-a", "-o", "json")).json
        assert [(one["owner"], one["account"]) for one in shown] == [(alice.uid, tool.name)]
        assert (await host.hutch(bob, "ps", "-a", "-o", "json")).json == []
