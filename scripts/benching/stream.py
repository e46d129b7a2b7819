"""A long answer in many deltas, through executor, journal and follower, against the bare SDK."""

from __future__ import annotations

from typing import Final

from scripts.benching.claude import Timed, pair
from scripts.benching.measure import Effort, Say, median

__all__ = ["bench"]

_DELTAS: Final = 5000


async def bench(effort: Effort, say: Say) -> None:
    """Compare the rates, and the CPU outside the CLI."""
    count = _DELTAS if effort.rounds > 1 else effort.of(_DELTAS)
    prompt = f"say {count} words"
    turns: list[tuple[Timed, Timed]] = []
    async with pair() as both:
        session = await both.open()
        await both.ours(session, "say 10 words")
        for _ in range(effort.rounds):
            through_hutch = await both.ours(session, prompt)
            turns.append((through_hutch, await both.bare("warm", prompt)))
    assert all(ours.deltas == bare.deltas for ours, bare in turns), turns
    ratio = median([ours.rate / bare.rate for ours, bare in turns])
    say("stream", f"{count} text deltas: rate", ratio, (">=", 0.8),
        per_second=median([ours.rate for ours, _ in turns]), sdk=median([bare.rate for _, bare in turns]))  # fmt: skip
    parts = [1e6 * median(times) / count for times in zip(*(ours.shares for ours, _ in turns), strict=True)]
    say("stream", f"{count} text deltas: CPU outside the CLI", median([o.cpu / b.cpu for o, b in turns]), ("<=", 5.0),
        us_a_delta=dict(zip(("hutchd", "client", "executor"), parts, strict=False)),
        sdk_us=1e6 * median([bare.cpu for _, bare in turns]) / count)  # fmt: skip
