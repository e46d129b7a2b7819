"""`scripts/bench [NAME...] [--quick]`: one JSON object per line and result; see README.md."""

from __future__ import annotations

import argparse
import importlib
import resource

import anyio

from scripts.benching.measure import EFFORTS, Effort, say_line

BENCHES = ("rpc", "floods", "relay", "prompt", "stream", "memory", "ps", "judge", "broker", "accounts", "sandbox")


async def run(names: list[str], effort: Effort, stalled: bool) -> None:
    """Run the benches, one after the other."""
    for name in names:
        module = importlib.import_module(f"scripts.benching.{name}")
        if name == "relay" and stalled:
            await module.bench_stalled(effort, say_line)
        else:
            await module.bench(effort, say_line)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measures what Hutch costs, as ratios.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which benches: {', '.join(BENCHES)} (default: all)")
    parser.set_defaults(effort="full")
    parser.add_argument("--quick", dest="effort", action="store_const", const="quick", help="fewer and shorter rounds")
    parser.add_argument("--effort", choices=tuple(EFFORTS), help="tiny only shows that the benches run")
    parser.add_argument("--stalled", action="store_true", help="relay: measure only the cost of one stalled follower")
    given = parser.parse_args()
    if unknown := set(given.names) - set(BENCHES):
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384) if hard > 0 else 16384, hard))
    anyio.run(run, given.names or list(BENCHES), EFFORTS[given.effort], given.stalled)


if __name__ == "__main__":
    main()
