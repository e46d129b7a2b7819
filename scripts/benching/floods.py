"""How much a thousand bad clients slow down a good one."""

from __future__ import annotations

import time
from typing import Final

import anyio

from scripts.benching.measure import Effort, Say, median, percentile
from scripts.benching.stage import program
from scripts.benching.wire import Line
from tests.system.host import host

__all__ = ["bench"]

_AIM: Final = ("<=", 3.0)
_BAD: Final = 1000
_SECONDS: Final = 8.0
"""Seconds; longer than the first-frame deadline, so that hutchd cuts off each bad client once."""
_PACE: Final = 0.002


async def bench(effort: Effort, say: Say) -> None:
    """Ping hutchd at a steady pace, without bad clients and with each kind of them."""
    seconds = max(0.5, _SECONDS * min(1.0, effort.seconds / 10))
    async with host("[executors]\nspares = 0\n") as made:
        with Line(made.socket) as line:
            for kind in ("nothing", "half", "garbage"):
                quiet: list[float] = []
                flooded: list[float] = []
                for _ in range(effort.rounds):
                    quiet += await _pings(line, seconds / 2)
                    async with program("flood", made.socket, kind, effort.of(_BAD)) as flood:
                        await flood.line()
                        flooded += await _pings(line, seconds)
                    await anyio.sleep(min(1.0, seconds / 4))  # hutchd notices their end meanwhile
                figures = {
                    name: {
                        "p50_us": 1e6 * median(them),
                        "p99_us": 1e6 * percentile(them, 0.99),
                        "max_us": 1e6 * max(them),
                    }
                    for name, them in (("quiet", quiet), ("flooded", flooded))
                }
                ratio = percentile(flooded, 0.99) / percentile(quiet, 0.99)
                say("floods", f"{effort.of(_BAD)} connections that send {kind}: ping p99", ratio, _AIM, **figures)


async def _pings(line: Line, seconds: float) -> list[float]:
    """Ping at the pace for `seconds`; return the seconds of each."""
    taken = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        taken.append(line.ask("ping"))
        await anyio.sleep(_PACE)
    return taken
