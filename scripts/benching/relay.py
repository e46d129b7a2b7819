"""From an executor through the store to followers, against a relay without a store and against a naive relay."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import msgspec

from hutch_shared import messages as m
from scripts.benching.measure import Effort, Say, median
from scripts.benching.stage import TOP, Program, leased, program
from scripts.benching.wire import Line
from tests.system.host import Host, host

__all__ = ["bench", "bench_stalled", "loaded_host"]

_SIZES: Final = {500: 20_000, 5_000: 4_000, 50_000: 500}
"""The number of events for each size of payload, in bytes."""
_NAIVE_SHARE: Final = 10
"""The naive relay gets this fraction of the events."""
_AIMS: Final = {5_000: ((">=", 0.3), (">=", 10.0)), 500: (None, None), 50_000: (None, None)}
_PER_COMMIT: Final = 50
_KEPT: Final = 0.9
_PATIENCE: Final = 120.0


@dataclass(frozen=True, slots=True)
class Relay:
    """A running relay: its client socket and its session."""

    socket: Path
    session: str

    async def rate(self, followers: Program, count: int, size: int) -> float:
        """Make the executor send `count` events; return how many per second reached every follower."""
        prompt = json.dumps({"count": count, "size": size})
        with Line(self.socket) as line:
            line.ask("get_version", {"protocol": m.PROTOCOL, "client": "bench"})
            line.ask("submit_prompt", {"session": self.session, "prompt": prompt})
            with anyio.fail_after(_PATIENCE):
                seen = await followers.answer({})
        assert all(events >= count + 2 for events in seen["events"]), (count, seen)
        return count / float(seen["seconds"])


async def bench(effort: Effort, say: Say) -> None:
    """Measure all three relays with one follower and with ten."""
    async with (
        loaded_host() as made,
        _hutchd(made) as ours,
        _other("memory_relay", made) as bare,
        _other("naive_relay", made) as naive,
    ):
        for size, whole in _SIZES.items():
            for readers in (1, 10):
                count = effort.of(whole, 20)
                case = f"{size / 1000:g} KB, {readers} follower{'s' * (readers > 1)}"
                rates: dict[str, list[float]] = {"hutch": [], "no_store": [], "naive": []}
                async with (
                    _followers(ours, readers) as a,
                    _followers(bare, readers) as b,
                    _followers(naive, readers) as c,
                ):
                    for _ in range(effort.rounds):
                        rates["hutch"].append(await ours.rate(a, count, size))
                        rates["no_store"].append(await bare.rate(b, count, size))
                        rates["naive"].append(await naive.rate(c, max(10, count // _NAIVE_SHARE), size))
                commits = await _commits(made, ours.session, effort.rounds)
                per_second = {name: median(values) for name, values in rates.items()}
                no_store, ten_times = _AIMS[size]
                say("relay", f"{case}: rate against no store", _ratio(rates, "no_store"), no_store, **per_second)
                say("relay", f"{case}: rate against naive", _ratio(rates, "naive"), ten_times)
                aim = (">=", _PER_COMMIT) if size == 5_000 else None
                say("relay", f"{case}: events a commit", effort.rounds * count / commits, aim)


async def bench_stalled(effort: Effort, say: Say) -> None:
    """Measure the rate of nine followers beside one more follower that does not read."""
    count, size = effort.of(_SIZES[5_000], 20), 5_000
    async with loaded_host() as made, _hutchd(made) as ours:
        rates: dict[str, list[float]] = {"stalled": [], "free": []}
        for _ in range(effort.rounds):
            for name, stalled in (("free", 0), ("stalled", 1)):
                async with _followers(ours, 9, stalled) as followers:
                    await ours.rate(followers, count, size)  # fills the stalled socket
                    rates[name].append(await ours.rate(followers, count, size))
        ratio = median([a / b for a, b in zip(rates["stalled"], rates["free"], strict=True)])
        figures = {name: median(values) for name, values in rates.items()}
        say("relay", "5 KB: nine followers beside a stalled one", ratio, (">=", _KEPT), **figures)


@asynccontextmanager
async def loaded_host() -> AsyncIterator[Host]:
    """Yield a host whose executors only make load."""
    async with host("[executors]\nspares = 0\n", start=False) as made:
        made.program = (*made.program[:1], "-m", "scripts.benching.programs.loaded_hutchd")
        made.extra_env["PYTHONPATH"] = str(TOP)
        await made.start()
        yield made


@asynccontextmanager
async def _hutchd(made: Host) -> AsyncIterator[Relay]:
    """Open a session on the host, and yield its relay."""
    async with made.client() as hutch:
        session = await hutch.open_session(m.OpenSession("script", str(made.folder("load")), permission_mode="bypass"))
        await leased(hutch, session)
        yield Relay(made.socket, session.id)


@asynccontextmanager
async def _other(name: str, made: Host) -> AsyncIterator[Relay]:
    """Start another relay, with an executor that only makes load."""
    folder = made.root / name
    folder.mkdir(mode=0o700)
    sockets = folder / "x.sock", folder / "c.sock"
    async with program(name, *sockets, folder) as relay:
        await relay.line()
        boot = m.Boot("x-0000000000000001", "token", str(sockets[0]), os.getuid(), "script")
        async with program("load", first_input=msgspec.json.encode(boot) + b"\n"):
            await anyio.sleep(1.0)  # the executor says hello
            yield Relay(sockets[1], "s-0000000000000001")


@asynccontextmanager
async def _followers(relay: Relay, readers: int, stalled: int = 0) -> AsyncIterator[Program]:
    async with program("followers", relay.socket, relay.session, readers, stalled) as followers:
        await followers.line()
        yield followers


async def _commits(made: Host, session: str, turns: int) -> int:
    """Return the number of receipts in the last turns: hutchd sends one after each commit."""
    async with made.client() as hutch:
        return sum(int(turn.result or 0) for turn in (await hutch.list_turns(session))[-turns:])


def _ratio(rates: dict[str, list[float]], other: str) -> float:
    return median([a / b for a, b in zip(rates["hutch"], rates[other], strict=True)])
