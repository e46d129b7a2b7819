"""The memory and CPU of an idle hutchd, and the memory of each session."""

from __future__ import annotations

from typing import Final

import anyio

from scripts.benching.measure import Effort, Say, children_of, cpu_of, median, pss_of, rss_of
from scripts.benching.stage import leased
from tests.system.host import Host, host

__all__ = ["bench"]

_SESSIONS: Final = 50
_RESIDENT: Final = 60.0
_IDLE_CPU: Final = 0.001
_MIB: Final = 1 << 20


async def bench(effort: Effort, say: Say) -> None:
    """Measure an idle hutchd, and one with many sessions."""
    async with host("[executors]\nspares = 0\n") as made:
        share = await _idle_share(made, effort.seconds)
        say("memory", "hutchd idle: resident MiB", rss_of(made.pid) / _MIB, ("<=", _RESIDENT))
        say("memory", f"hutchd idle for {effort.seconds:g} s: share of a CPU", share, ("<=", _IDLE_CPU))
        count = effort.of(_SESSIONS, 2)
        async with made.client() as hutch:
            for _ in range(count):
                await leased(hutch, await made.script(hutch, [{"text": "x"}]))
            share = await _idle_share(made, effort.seconds)
            executors = [pss_of(pid) or rss_of(pid) for pid in children_of(made.pid)]
        resident = rss_of(made.pid) / _MIB
        say("memory", f"hutchd with {count} sessions: resident MiB", resident, None, share_of_a_cpu=share)
        say("memory", f"each of {len(executors)} executors: proportional MiB", median(executors) / _MIB, None)


async def _idle_share(made: Host, seconds: float) -> float:
    """Return the share of a CPU that hutchd uses while no client calls it."""
    await anyio.sleep(min(2.0, seconds))
    before = cpu_of(made.pid)
    await anyio.sleep(seconds)
    return (cpu_of(made.pid) - before) / seconds
