"""The cost of starting an executor as another account, and whether it depends on hutchd's size."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from scripts.benching.measure import Effort, Say, median
from tests.system.shared_host import SharedHost, shared_host

__all__ = ["bench"]

_STARTER: Final = Path(__file__).with_name("programs") / "starter.py"
_GIB: Final = 1024
_DEAREST: Final = 2.0
_NO_DEARER: Final = 1.1
_STARTS: Final = 40


async def bench(effort: Effort, say: Say) -> None:
    """Start executors as another account and by a plain fork, in turn; then the same from a process of 1 GiB."""
    if os.geteuid() != 0:
        say("accounts", "executors as another account: only root can make the account that this needs", None)
        return
    async with shared_host("alice", start=False) as host:
        await host.start_launcher()
        small: list[float] = []
        against: list[float] = []
        large: list[float] = []
        answers: list[float] = []
        for _ in range(effort.rounds):
            count = effort.of(_STARTS // effort.rounds, 2)
            without, with_ballast = await _starts(host, count, 0), await _starts(host, count, _GIB)
            small.append(median([ready for _, ready in without["launcher"]]))
            against.append(median([ready for _, ready in without["plain"]]))
            large.append(median([ready for _, ready in with_ballast["launcher"]]))
            answers.append(median([answered for answered, _ in without["launcher"]]))
        ratio = median([one / other for one, other in zip(small, against, strict=True)])
        say(
            "accounts",
            "an executor as another account, until it is ready, against a plain fork and exec",
            ratio,
            ("<=", _DEAREST),
            ms=1000 * median(small),
            plain_ms=1000 * median(against),
            launcher_answers_ms=1000 * median(answers),
        )
        ratio = median([one / other for one, other in zip(large, small, strict=True)])
        say(
            "accounts",
            "the same from a process of 1 GiB, against one of no size",
            ratio,
            ("<=", _NO_DEARER),
            ms=1000 * median(large),
        )


async def _starts(host: SharedHost, count: int, ballast: int) -> dict[str, list[tuple[float, float]]]:
    program = host.root / "starter.py"  # a place that the account can read
    program.write_text(_STARTER.read_text())
    program.chmod(0o644)
    words = [host.code.python, program, host.launcher_socket, host.people["alice"].uid, count, ballast]
    run = partial(host.hutch_account.run, *[str(word) for word in words], timeout=600.0)
    done = await anyio.to_thread.run_sync(run)
    assert done.returncode == 0, f"{done.stderr}\n{host.log_text()}"
    found: dict[str, list[tuple[float, float]]] = json.loads(done.stdout)
    return found
