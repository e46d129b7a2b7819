"""The time of one judgement: the median for a typical line, which is parsed each time.

python tests/daemon/permissions/bench.py
"""

from __future__ import annotations

import statistics
import sys
import time

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_shared.vocabulary import to_call

_LAYER = Layer(
    "account",
    allow=("Bash(git status:*)", "Bash(ls:*)", "Bash(head:*)", "Bash(npm run test:*)", "Edit(src/**)"),
    ask=("Bash(git push:*)",),
    deny=("Read(.env)", "Bash(rm:*)"),
    base="/w",
)


def median(line: str, rounds: int = 2_000) -> float:
    """Return the median seconds of `judge` for the line; each run gets a different text."""
    policy = compile_policy([_LAYER], home="/home/u")
    call = to_call("Bash", {"command": line}, "c", "/w")
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}
    taken: list[float] = []
    for number in range(rounds):
        fresh = to_call("Bash", {"command": f"{line} # {number}"}, "c", "/w")
        began = time.perf_counter()
        verdict = judge(policy, fresh, mode="ask", cwd="/w", real=real, home="/home/u", workspace="/w")
        taken.append(time.perf_counter() - began)
        assert verdict.decision == "allow"
    return statistics.median(taken)


def main() -> int:
    for line in ("npm run test", "git status --short && ls -la src | head -5"):
        print(f"{median(line) * 1e6:.0f} µs  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
