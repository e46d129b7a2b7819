"""Runs of the harness: many kills chosen by a seed, or a few named ones; then the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from tests.crash.harness.places import FAILPOINTS
from tests.crash.harness.rig import Rig, rig
from tests.crash.harness.verdict import CHECKS, Violation, judge, obedience

HANGS = 200.0
"""Seconds that a run may take beyond the time for kills before it is aborted."""
PER_KILL = 8.0
"""The average seconds per kill. A slow machine kills fewer processes than requested."""
FAILPOINT = 30.0
"""Seconds that a directed run waits for hutchd to be killed at its failpoint."""
SETTLE = 60.0
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}

ACTIONS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    "hutchd": lambda one: one.kill_hutchd(),
    "executor": lambda one: one.kill_some_executor(),
    "all executors": lambda one: one.kill_all_executors(),
    "busy": lambda one: one.kill_busy_executor(),
    "agent": lambda one: one.kill_some_agent(),
    "client": lambda one: one.kill_some_party(),
    "hold question": lambda one: one.hold_question(),
    "asker": lambda one: one.kill_asking_executor(),
    "old hutchd": lambda one: one.start_old_hutchd(),
    "spool": lambda one: one.kill_executor_of_an_absent_hutchd(),
}
WEIGHTS = {"hutchd": 40, "executor": 20, "agent": 10, "client": 20, "spool": 5}


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    seed: int
    kills: dict[str, int]
    hits: dict[str, int]
    adoption: list[float]
    answerable: list[float]
    turns: int
    events: int
    violations: list[Violation]
    seconds: float
    kept: Path | None = None
    """The folder with the logs of a failed run."""

    @property
    def words(self) -> set[str]:
        return {violation.word for violation in self.violations}

    def summary(self) -> dict[str, Any]:
        """Return the figures as plain JSON."""
        return {
            "seed": self.seed,
            "kills": sum(self.kills.values()),
            "by_kind": self.kills,
            "failpoints_hit": self.hits,
            "adoption_seconds": percentiles(self.adoption),
            "question_answerable_seconds": percentiles(self.answerable),
            "turns": self.turns,
            "events": self.events,
            "seconds": round(self.seconds, 1),
            "violations": [str(violation) for violation in self.violations],
            **({"logs": str(self.kept)} if self.kept is not None else {}),
        }

    def as_json(self) -> Iterator[dict[str, Any]]:
        """Return each violation with the lines of its log, then the summary, as plain JSON."""
        yield from (violation.as_json() for violation in self.violations)
        yield self.summary()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the count, the median, the 99th percentile and the maximum."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}
    return {"count": len(ordered)} | {name: round(value, 3) for name, value in at.items()}


async def crash(
    *,
    seed: int,
    kills: int | None = None,
    seconds: float | None = None,
    with_claude: bool = False,
    say: Callable[[dict[str, Any]], None] | None = None,
) -> Report:
    """Kill at random until `kills` processes were killed or `seconds` have passed (default: 8 per kill)."""
    began = time.monotonic()

    allowed = seconds if seconds is not None else PER_KILL * (kills or 0)

    async def work(one: Rig) -> None:
        until = time.monotonic() + allowed
        while sum(one.kills.values()) < (kills or 10**6) and (time.monotonic() < until or not one.adoption):
            await _kill_something(one)
            await one.rest(one.rng.uniform(0.0, 0.5))
            if say is not None:
                counts = {"kills": sum(one.kills.values()), "by_kind": dict(one.kills), "noticed": len(one.noticed)}
                say({"at": round(time.monotonic() - began, 1), **counts})

    return await _run(work, seed=seed, settle=SETTLE, limit=allowed + HANGS, with_claude=with_claude)


async def _kill_something(one: Rig) -> None:
    (action,) = one.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    if action == "hutchd":
        name = one.rng.choice([None, *(name for name, place in FAILPOINTS.items() if place.under_load)])
        failpoint = f"{name}:{one.rng.choice((1, 1, 2, 5, 20))}" if name is not None else None
        await one.kill_hutchd(failpoint, settled=one.rng.random() < 0.85)
        if name is not None and FAILPOINTS[name].process == "executor":
            await one.kill_all_executors()  # new executors will reach the failpoint
            await one.rest(1.0)
    else:
        await ACTIONS[action](one)


async def directed(
    *actions: str,
    seed: int = 1,
    fault: str | None = None,
    settle: float = SETTLE,
    then: Callable[[Rig], Awaitable[None]] | None = None,
) -> Report:
    """Carry out `actions` one after another (`hutchd`, `hutchd@FAILPOINT:k`, `executor`, …), then judge."""

    async def work(one: Rig) -> None:
        await one.going()
        await one.rest(0.3)
        for action in actions:
            kind, _, failpoint = action.partition("@")
            if failpoint:
                await one.kill_hutchd(failpoint)
                until = time.monotonic() + FAILPOINT
                while one.mark.exists() and time.monotonic() < until:
                    await one.rest(0.5)
                await one.rest(1.0)
            else:
                await ACTIONS[kind](one)
                await one.rest(0.4)
        if then is not None:
            await then(one)

    return await _run(work, seed=seed, settle=settle, fault=fault, limit=HANGS)


async def _run(
    work: Callable[[Rig], Awaitable[None]],
    *,
    seed: int,
    settle: float,
    limit: float,
    fault: str | None = None,
    with_claude: bool = False,
) -> Report:
    began = time.monotonic()
    kept: Path | None = None
    try:
        with anyio.fail_after(limit):
            async with rig(seed, fault=fault, with_claude=with_claude) as one:
                try:
                    await work(one)
                    evidence = await one.end(settle)
                    violations = judge(evidence, (obedience,) if one.is_old else CHECKS)
                except BaseException:
                    kept = one.keep()
                    raise
                if violations and fault is None:
                    kept = one.keep()
    except BaseException as error:
        error.add_note(f"The run has the seed {seed}; its logs are in {kept}.")
        raise
    return Report(
        seed=seed,
        kills=dict(one.kills),
        hits=dict(Counter(line[1] for line in evidence.witness if line[0] == "died")),
        adoption=one.adoption,
        answerable=one.answerable,
        turns=len(evidence.turns),
        events=len(evidence.histories["*"]),
        violations=violations,
        seconds=time.monotonic() - began,
        kept=kept,
    )
