"""`scripts/soak [--seconds N]`: runs hutchd for minutes, with followers that come and go or do not read.

It prints a sample of hutchd every few seconds (descriptors, threads, memory, zombies, processes), and finally a
verdict, which compares the last third of the run with the first. It exits with 1 if a figure grew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from scripts.benching.measure import children_of, median, rss_of
from scripts.benching.wire import Line
from tests.system.host import Host, host

__all__ = ["Sample", "soak", "verdict"]

_SAMPLES: Final = 60
"""The number of samples of a run."""
_WORKERS: Final = 3
_COMERS: Final = 5
_STALLED: Final = 3
_STALLED_FOR: Final = 5.0
_BURST: Final = 200
_PATIENCE: Final = 60.0
_FLAT: Final = {"descriptors": (1.1, 16), "threads": (1.0, 4), "resident": (1.15, 8 << 20), "zombies": (1.0, 1)}
"""By figure: a factor and an amount. The last third may be at most the first third × factor + amount."""


@dataclass(frozen=True, slots=True)
class Sample:
    """hutchd's use of resources at one moment."""

    second: float
    descriptors: int
    threads: int
    resident: int
    zombies: int
    processes: int
    turns: int
    events: int


@dataclass(slots=True)
class Done:
    """The turns and events of the load so far."""

    turns: int = 0
    events: int = 0


def verdict(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the medians of the first and the last third of the samples, and whether each figure stayed flat."""
    third = max(1, len(samples) // 3)
    found: dict[str, Any] = {}
    for name, (factor, more) in _FLAT.items():
        first = median([getattr(sample, name) for sample in samples[:third]])
        last = median([getattr(sample, name) for sample in samples[-third:]])
        found[name] = {"first": first, "last": last, "flat": last <= first * factor + more}
    return {"verdict": "flat" if all(one["flat"] for one in found.values()) else "grows", **found}


async def soak(seconds: float) -> bool:
    """Run the load and print samples and verdict; return whether every figure stayed flat. A failed turn raises."""
    samples: list[Sample] = []
    done = Done()
    async with host("[executors]\nspares = 0\n") as made, made.client() as hutch, anyio.create_task_group() as tasks:
        for number in range(_WORKERS):
            tasks.start_soon(_work, made, hutch, number, done)
        for _ in range(_COMERS):
            tasks.start_soon(_come_and_go, hutch)
        for _ in range(_STALLED):
            tasks.start_soon(_stall, made)
        began = time.monotonic()
        await anyio.sleep(seconds / 10)  # by then hutchd has used each of its parts once
        while (now := time.monotonic() - began) < seconds or len(samples) < 3:
            samples.append(_look(made, now, done))
            print(json.dumps(asdict(samples[-1])), flush=True)
            await anyio.sleep(seconds / _SAMPLES)
        tasks.cancel_scope.cancel()
    found = verdict(samples)
    print(json.dumps({**found, "turns": done.turns, "events": done.events}), flush=True)
    return bool(found["verdict"] == "flat")


def _look(made: Host, second: float, done: Done) -> Sample:
    own = Path(f"/proc/{made.pid}")
    children = children_of(made.pid)
    return Sample(
        round(second, 1),
        len(os.listdir(own / "fd")),
        len(os.listdir(own / "task")),
        rss_of(made.pid),
        sum(_is_zombie(child) for child in children),
        len(children),
        done.turns,
        done.events,
    )


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


async def _work(made: Host, hutch: HutchClient, number: int, done: Done) -> None:
    """Open a session, play a few turns, close and delete it; repeat."""
    lines: list[dict[str, Any]] = [{"repeat": {"times": _BURST, "line": {"delta": "word "}}}, {"text": "done"}]
    for round_ in itertools.count():
        session = await made.script(hutch, lines, f"soak-{number}-{round_ % 2}")
        for _ in range(5):
            await _turn(hutch, session, done)
        await hutch.close_session(session.id)
        await hutch.call("delete_session", m.SessionRef(session.id))


async def _turn(hutch: HutchClient, session: m.Session, done: Done) -> None:
    """Play a turn, and check that each event arrives once."""
    async with hutch.follow(m.FollowEvents(session.id, after=-1)) as follow:
        turn = await hutch.submit_prompt(session.id, "go")
        seen = follow.head
        with anyio.fail_after(_PATIENCE):
            async for event in follow:
                assert event.seq == seen + 1, (event.seq, seen)
                seen = event.seq
                done.events += 1
                if event.kind == "turn_ended" and event.turn == turn.id:
                    break
        assert b'"completed"' in bytes(event.data), bytes(event.data)
        done.turns += 1


async def _come_and_go(hutch: HutchClient) -> None:
    """Follow all sessions for a few events, leave, return with the cursor; repeat."""
    after = -1
    while True:
        try:
            async with hutch.follow(m.FollowEvents("*", after=after)) as follow:
                for _ in range(_BURST):
                    after = (await anext(follow)).position
        except HutchError:
            after = -1


async def _stall(made: Host) -> None:
    """Follow all sessions without reading, then close the connection; repeat."""
    while True:
        with Line(made.socket) as line:
            await anyio.to_thread.run_sync(line.ask, "get_version", {"protocol": m.PROTOCOL, "client": "stalled"})
            await anyio.to_thread.run_sync(line.ask, "follow_events", {"session": "*", "after": 0})
            await anyio.sleep(_STALLED_FOR)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Checks that hutchd stays flat under load.")
    parser.add_argument("--seconds", type=float, default=600.0)
    sys.exit(0 if anyio.run(soak, parser.parse_args().seconds) else 1)


if __name__ == "__main__":
    main()
