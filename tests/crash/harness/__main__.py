"""`scripts/crash`: kills processes at random and reports the promises that were broken."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from typing import Any

import anyio

from tests.crash.harness.run import crash


def main() -> int:
    """Run; print progress, violations and summary as JSON lines. Return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="scripts/crash", description="Kills processes, and checks every promise.")
    parser.add_argument("--kills", type=int, help="how many to kill (default: 100, unless --seconds is given)")
    parser.add_argument("--seconds", type=float, help="the longest time to kill for")
    parser.add_argument("--seed", type=int, default=None, help="repeats the choices of a run (default: a fresh seed)")
    parser.add_argument("--claude", action="store_true", help="also run sessions of the real Claude, with our model")
    given = parser.parse_args()
    kills = given.kills if given.kills is not None or given.seconds is not None else 100
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 32)
    say({"seed": seed, "kills": kills, "seconds": given.seconds})
    last = 0

    def progress(state: dict[str, Any]) -> None:
        nonlocal last
        if state["kills"] >= last + 20:
            last = state["kills"]
            say(state)

    async def run() -> int:
        report = await crash(seed=seed, kills=kills, seconds=given.seconds, with_claude=given.claude, say=progress)
        for line in report.as_json():
            say(line)
        return 1 if report.violations else 0

    return anyio.run(run)


def say(line: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
