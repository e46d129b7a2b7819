"""Each attack of the table is attempted in each column, by a command of the real CLI.

What succeeds is what the table says. The column without a sandbox is the control: an attack that fails there proves
nothing elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import pytest

from hutch_shared.attacks import ATTACKS, Attack, open_attacks
from hutch_shared.messages import SandboxKind
from tests.programs import bubblewrap
from tests.rehearsal import Say, serve
from tests.sampling import sample
from tests.system.attack_stage import (
    AttackStage,
    Line,
    Observed,
    attack_stage,
    bare_path,
    closed_namespaces,
    reload_settings,
)
from tests.system.host import KEY, settings_for
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

Column = tuple[SandboxKind | None, str]
BARE: Final[Column] = (None, "full")
COLUMNS: Final[tuple[Column, ...]] = (
    BARE,
    ("bubblewrap", "full"),
    ("bubblewrap", "broker-only"),
    ("landlock", "full"),
    ("landlock", "broker-only"),
)
OF_THE_KERNEL: Final = {
    *("change-attributes", "type-terminal", "vsock", "socket-families", "io-uring", "userfaultfd", "keyrings"),
    *("foreign-abi", "user-namespaces", "mounts", "trace-processes", "read-processes", "set-uid"),
}
"""Attacks that a kernel or a machine may refuse to all. If they fail without a sandbox, they show nothing elsewhere."""
RACES: Final = {"outlive"}
"""Attacks that succeed under Landlock if a process wins a race, which it often loses."""


def landlock_abi() -> int:
    """Return the ABI of this kernel's Landlock; skip the test without it."""
    abi = int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    if abi < 1:
        pytest.skip("kernel: it has no Landlock")
    return abi


def settings_of(column: Column) -> str:
    """Return the section of the settings for a column."""
    kind, network = column
    mode = "off" if kind is None else "require"
    return f'[sandbox]\nmode = "{mode}"\nnetwork = "{network}"\n' + (f'kind = "{kind}"\n' if kind else "")


@asynccontextmanager
async def staged(host: SharedHost) -> AsyncIterator[AttackStage]:
    """Prepare a host for attacks. Its settings are those without a sandbox."""
    async with serve(key=KEY, script=lambda _: Say("hello")) as model:
        host.settings = settings_for(model, "[executors]\nspares = 0\n")
        if host.daemon is None:
            await host.start_launcher()
            await host.start()
        await configure(host, settings_of(BARE))
        await host.hutch(host.people["alice"], "key", "add", "anthropic", input=KEY)
        async with attack_stage(host, model) as stage:
            yield stage


async def configure(host: SharedHost, sandbox: str) -> None:
    """Have hutchd read other settings of the sandbox."""
    await reload_settings(host, host.settings.partition("[sandbox]")[0] + sandbox)


def expect(attack: Attack, line: Line, column: Column, control: Line, abi: int, *, own: bool) -> None:
    """Compare one result with the table."""
    bare = attack.cell(None, own_account=own).is_open(*BARE[1:], abi)
    if bare and not control.open and attack.name in OF_THE_KERNEL:
        pytest.skip(f"kernel: {attack.name} is impossible here: {control.said[:200]}")
    expected = attack.cell(column[0], own_account=own).is_open(column[1], abi)
    if attack.name in RACES and column[0] == "landlock":
        assert expected or not line.open, line.said
    else:
        assert line.open == expected, line.said
    assert "stopped" not in line.said


def compare(subtests: pytest.Subtests, seen: Mapping[Column, Observed], *, own: bool) -> None:
    """Compare all results, and what the sessions say of themselves, with the table."""
    abi, control = landlock_abi(), seen[BARE].lines
    assert {*control} == {attack.name for attack in ATTACKS}
    for column, observed in seen.items():
        assert observed.session.isolation.sandbox == column[0]
        assert observed.session.keys == ("brokered" if column[0] or not own else "exposed")
        left = open_attacks(column[0], own_account=own, network=column[1], abi=abi)
        assert observed.session.isolation.open == left
        for attack in ATTACKS:
            with subtests.test(attack=attack.name, column=column):
                expect(attack, observed.lines[attack.name], column, control[attack.name], abi, own=own)


@sample(1)
@pytest.mark.parametrize("own", [True, False], ids=["own account", "another account"])
async def test_what_succeeds_is_what_the_table_says(subtests: pytest.Subtests, *, own: bool) -> None:
    """For each attack, sandbox and network, and for hutchd's own account and another one."""
    bubblewrap()
    landlock_abi()
    seen: dict[Column, Observed] = {}
    async with shared_host("alice", "bob", start=False, own=own) as host, staged(host) as stage:
        for column in COLUMNS:
            await configure(host, settings_of(column))
            seen[column] = await stage.attack("-".join(map(str, column)))

    compare(subtests, seen, own=own)


@sample(1)
@pytest.mark.parametrize("lacks", ["bubblewrap", "namespaces"])
async def test_a_host_without_bubblewrap_has_landlock(subtests: pytest.Subtests, lacks: str) -> None:
    """By default a session has Landlock there, its key is brokered, and the table holds.

    bubblewrap is not installed, or the kernel's settings refuse it the namespaces that it needs.
    """
    landlock_abi()
    seen: dict[Column, Observed] = {}
    async with shared_host("alice", "bob", start=False, own=True) as host:
        if lacks == "bubblewrap":
            host.hutchd_env["PATH"] = bare_path(host.root)
        else:
            bubblewrap()
            host.around = closed_namespaces()
        async with staged(host) as stage:
            seen[BARE] = await stage.attack("bare")
            await configure(host, "")
            seen["landlock", "full"] = await stage.attack("default")

    compare(subtests, seen, own=True)
