"""An attacker beside a victim: every attack on files, processes and sockets fails, and all processes live on.

A shell, the script runner and the real CLI's Bash run each attack of `programs/hostile.py`, in a sandbox and without.
The same attacks against an agent of the attacker's own account succeed, so they are real.
"""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hutch_shared.host_mark import MARK
from tests.accounts import Account
from tests.programs import bubblewrap
from tests.rehearsal import Model, Say, serve
from tests.system import processes
from tests.system.host import settings_for
from tests.system.hostile import (
    ALICES_KEY,
    LEASE,
    MALLORYS_KEY,
    PROGRAMS,
    claude,
    diary,
    find_in_memory,
    lend,
    run_claude,
    run_script,
    targets,
    whole,
)
from tests.system.log import log_of
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

WAYS = ("person", "script", "script-strict", "claude", "claude-strict")
ATTACKS = tuple(
    one.name
    for one in ast.parse((PROGRAMS / "hostile.py").read_text()).body
    if isinstance(one, ast.FunctionDef) and any(isinstance(mark, ast.Name) for mark in one.decorator_list)
)
EFFECTIVE = {
    *(
        "reads_files",
        "writes_files",
        "watches",
        "reads_processes",
        "writes_processes",
        "reads_memory_by_call",
        "traces",
    ),
    *("takes_descriptors", "signals", "steers", "takes_shared_memory", "dials_their_sockets"),
    *("reads_as_root_of_a_namespace",),
}
"""Attacks that succeed against an agent of one's own account outside of a sandbox. The others never succeed."""

_HARM = ("writes_processes", "writes_files", "signals")
CONTROL = (*(one for one in ATTACKS if one not in _HARM), *_HARM)
"""The order of the attacks: the harmless ones first."""
OPEN_UNDER_LANDLOCK = {
    "watches": ("watch ",),
    "reads_processes": ("agent fd: ", "executor fd: "),
    "steers": ("setpriority ", "affinity ", "scheduler ", "ioprio ", "priority of all"),
    "writes_files": ("touch ",),
    "gains_rights": ("setuid: ", "setgid: "),
}
"""The steps that succeed under Landlock against the own account; it may set its uid and gid to what they are."""
LEFT = ("x-mallory", "x-link", "mallory.sock")
"""The files that `writes_hutch` creates."""

Played = dict[str, dict[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Stage:
    """The attacks that were tried, by the way they were run, and their results."""

    played: dict[str, Played]
    levels: dict[str, str]
    changed: dict[str, list[str]]
    own: Played
    diary: dict[str, Any]
    lived: dict[str, bool]


async def play(
    host: SharedHost, model: Model, who: Account, way: str, told: dict[str, Any], attacks: Sequence[str] = ()
) -> tuple[Played, str]:
    """Run all attacks in one way, in this order; return each result, and the isolation level."""
    folder = host.folder(who, f"attack-{way}") if way != "claude" else who.home
    program = lend(who, "hostile.py", folder)
    (folder / "targets.json").write_text(json.dumps(told))
    (folder / "targets.json").chmod(0o644)
    command = f"{host.code.python} -I {program} {folder}/targets.json {folder}/result.json {' '.join(attacks)}"
    level = ""
    if way == "person":
        done = who.run(*command.split(), cwd=folder, timeout=120)
        assert done.returncode == 0, done
    elif way.startswith("script"):
        more = {"isolation": "strict"} if way.endswith("strict") else {}
        end, said = await run_script(host, who, command, folder.name, **more)
        assert end.state == "completed", (end, said)
        level = more.get("isolation", "account")
    else:
        session, end, said = await run_claude(host, model, who, command, "." if way == "claude" else folder.name)
        assert end.state == "completed", (end, said)
        level = session.isolation.level
    result = folder / "result.json"
    assert result.exists(), said
    return json.loads(result.read_text()), level


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Run everything once."""
    bubblewrap()
    async with (
        serve(key=ALICES_KEY, script=lambda _: Say("hello")) as hers,
        serve(key=MALLORYS_KEY, script=lambda _: Say("hello")) as mallorys,
        shared_host("alice", "mallory", settings=settings_for(hers, "[executors]\nspares = 0\n")) as host,
    ):
        alice, mallory = host.people["alice"], host.people["mallory"]
        await host.hutch(alice, "key", "add", "anthropic", input=ALICES_KEY)
        await host.hutch(mallory, "key", "add", "anthropic", "--base-url", mallorys.url, input=MALLORYS_KEY)
        played: dict[str, Played] = {}
        levels: dict[str, str] = {}
        changed: dict[str, list[str]] = {}
        async with host.client(alice) as hutch:
            lives = await claude(host, hutch, alice, "claude")
            async with log_of(hutch, lives) as log:
                assert (await log.play(lives, "go")).state == "completed"
                async with diary(host, hutch, alice) as kept:
                    told = await targets(host, kept, lives)
                    lease = find_in_memory(told["pids"]["claude-executor"], LEASE).decode()
                    told["secrets"] |= {"key": ALICES_KEY, "lease": lease}
                    for way in WAYS:
                        played[way], levels[way] = await play(host, mallorys, mallory, way, told)
                        changed[way] = [one for one in told["hutch"]["places"] if not Path(one).is_dir()]
                        changed[way] += [str(path) for path in host.root.rglob("*") if path.name in LEFT]
                    found = await kept.close()
                    lived = {name: processes.alive(pid) for name, pid in told["pids"].items() if name != "agent"}
                lived["turn of claude"] = (await log.play(lives, "again")).state == "completed"
                await whole(host)
            async with diary(host, hutch, alice, "control") as again:
                own, _ = await play(host, hers, alice, "script", await targets(host, again), CONTROL)
        yield Stage(played, levels, changed, own, found, lived)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_attack_reaches_another_user(stage: Stage, attack: str, way: str) -> None:
    """This holds for every way of running it, in a sandbox or without."""
    got = stage.played[way][attack]["got"]
    if way == "person" and attack in ("gains_rights", "looks_into_its_own_executor"):
        got = [one for one in got if "CapBnd" not in one and "may gain privileges" not in one]  # a user may use sudo

    if way.endswith("-strict") and attack == "writes_hutch":  # in that sandbox the attack changes only its own files
        got = [one for one in got if not one.startswith(("make a ", "listens in ", "rename "))]
    # The mark says to every account that a hutchd serves this host.
    got = [one for one in got if not (one.startswith(("read ", "watch ")) and f"/{MARK}: " in one)]

    assert got == []
    assert stage.changed[way] == []


async def test_every_attack_was_run(stage: Stage) -> None:
    """Each was run in each way, with and without a sandbox, and most of its steps were refused."""
    assert {way: set(played) for way, played in stage.played.items()} == {way: set(ATTACKS) for way in WAYS}
    notes = [one for played in stage.played.values() for one in played.values()]
    assert not [said for one in notes for said in one["said"] if "stopped" in said]
    assert all(played[attack]["said"] for played in stage.played.values() for attack in ("reads_files", "traces"))
    assert stage.levels == {
        "person": "",
        "script": "account",
        "script-strict": "strict",
        "claude": "account",
        "claude-strict": "strict",
    }


async def test_the_attacks_work_within_one_account(stage: Stage) -> None:
    """Outside a sandbox most of them succeed against the same account, so they are real attacks."""
    effective = {attack for attack, notes in stage.own.items() if notes["got"]}

    assert effective >= EFFECTIVE
    assert "looks_into_its_own_executor" not in effective


async def test_the_victims_are_unharmed(stage: Stage) -> None:
    """Files, memory and queues are unchanged, no signal arrived, every process lives, and the next turn completes."""
    assert stage.diary == {"touched": [], "signals": []}
    assert stage.lived == dict.fromkeys(stage.lived, True)
    assert len(stage.lived) == 7


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
async def test_a_sandbox_holds_within_one_account(kind: str) -> None:
    """The same attacks against an agent of the same account, from a sandbox: they change and obtain nothing of it.

    Under Landlock they change its priority and times, and see the names of things.
    """
    bubblewrap()
    async with (
        serve(key=ALICES_KEY, script=lambda _: Say("hello")) as model,
        shared_host("alice", settings=settings_for(model, f'[sandbox]\nkind = "{kind}"\n')) as host,
    ):
        alice = host.people["alice"]
        await host.hutch(alice, "key", "add", "anthropic", input=ALICES_KEY)
        async with host.client(alice) as hutch, diary(host, hutch, alice) as kept:
            told = await targets(host, kept)
            played, _ = await play(host, model, alice, "claude-strict", told, CONTROL)
            found = await kept.close()
    got = {attack: notes["got"] for attack, notes in played.items()}

    assert {*got} == {*ATTACKS}
    assert not [said for notes in played.values() for said in notes["said"] if "stopped" in said]
    assert found["signals"] == []
    if kind == "bubblewrap":
        assert found["touched"] == []
        assert not [
            one for steps in got.values() for one in steps if any(word in one for word in told["secrets"].values())
        ]
    else:
        assert found["touched"] == ["limits"]
        left = {
            attack: [one for one in steps if not one.startswith(OPEN_UNDER_LANDLOCK.get(attack, "-"))]
            for attack, steps in got.items()
        }
        assert not {attack: steps for attack, steps in left.items() if steps}
