"""The whole command `hutch ps`, against an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from scripts.benching.measure import Effort, Say, median
from scripts.benching.stage import leased
from tests.system.host import HUTCH, host

__all__ = ["bench"]

_AIM: Final = ("<=", 6.0)
_RUNS: Final = 10
_FOREIGN: Final = ("claude_agent_sdk", "jsonrpcserver")


async def bench(effort: Effort, say: Say) -> None:
    """Run both in turn; count the packages that the command imports and does not need."""
    async with host("[executors]\nspares = 0\n") as made, made.client() as hutch:
        for _ in range(3):
            await leased(hutch, await made.script(hutch, [{"text": "x"}]))
        ours: list[float] = []
        bare: list[float] = []
        for _ in range(effort.rounds * _RUNS if effort.rounds > 1 else 2):
            ours.append(_timed([*HUTCH, "ps"], made.env))
            bare.append(_timed([sys.executable, "-c", "pass"], made.env))
        imported = _imports([sys.executable, "-X", "importtime", *HUTCH[1:], "ps"], made.env)
    ratio = median([a / b for a, b in zip(ours, bare, strict=True)])
    say("ps", "hutch ps, whole command", ratio, _AIM, ms=1e3 * median(ours), python_ms=1e3 * median(bare))
    foreign = sum(name in imported for name in _FOREIGN)
    say("ps", f"imports of {' and '.join(_FOREIGN)}", float(foreign), ("<=", 0.0))


def _imports(argv: Sequence[str], env: Mapping[str, str]) -> str:
    return subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stderr


def _timed(argv: Sequence[str], env: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
