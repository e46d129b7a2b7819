"""Feeds random lines to the parser and the matcher: none may raise, and none may take long.

python tests/daemon/permissions/fuzz.py --lines 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from hutch_daemon.permissions.layers import Layer, Policy, compile_policy
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_daemon.permissions.shell import grammar
from hutch_shared.messages import PermissionMode, ToolCall
from tests.daemon.permissions.lines import hostile, plausible

_LAYER = Layer(
    "session",
    allow=("Bash(git:*)", "Bash(ls *)", "Bash(cat:*)", "Bash(make test*)", "Edit(src/**)", "WebFetch(domain:*.a.test)"),
    ask=("Bash(git push:*)", "Read(secrets/**)"),
    deny=("Bash(rm -rf:*)", "Bash(* * x)", "Read(.env)", "Edit(//etc/**)", "mcp__a__*_b", "WebFetch(domain:127.0.0.1)"),
    base="/w",
)
_MODES: tuple[PermissionMode, ...] = ("ask", "accept_edits", "plan", "bypass", "unattended")


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest line and its seconds of thread CPU time."""

    line: str
    seconds: float


def calls(random_: random.Random, text: str) -> ToolCall:
    """Return a tool call that contains the text, mostly as its command."""
    kind = random_.random()
    if kind < 0.8:
        return ToolCall(call_id="c", action="run_command", agent_tool="Bash", input={}, command=text)
    if kind < 0.9:
        return ToolCall(call_id="c", action="edit", agent_tool="Edit", input={}, paths=(text,))
    if kind < 0.95:
        return ToolCall(call_id="c", action="fetch", agent_tool="WebFetch", input={}, url="http://" + text)
    return ToolCall(call_id="c", action="mcp", agent_tool=text, input={}, server=text, tool=text)


def fuzz(lines: int, seed: int) -> Slowest:
    """Judge this many lines; an exception carries its line as a note."""
    random_ = random.Random(seed)
    policy = compile_policy([_LAYER], home="/home/u")
    slowest = Slowest("", 0.0)
    for _ in range(lines):
        text = hostile(random_) if random_.random() < 0.7 else plausible(random_)
        call, mode = calls(random_, text), random_.choice(_MODES)
        try:
            seconds = taken(policy, call, mode)
            # Other load can only make a line slower, so take the fastest of a few runs.
            for _ in range(4):
                if seconds > slowest.seconds:
                    seconds = min(seconds, taken(policy, call, mode))
        except Exception as error:
            error.add_note(f"line {text!r}, seed {seed}")
            raise
        if seconds > slowest.seconds:
            slowest = Slowest(text, seconds)
    return slowest


def taken(policy: Policy, call: ToolCall, mode: PermissionMode) -> float:
    """Return the seconds of thread CPU time of the call, without caches."""
    grammar._find.cache_clear()
    began = time.thread_time()
    real = {path: path for path in paths_to_resolve(call, "/w", "/home/u")}
    judge(policy, call, mode=mode, cwd="/w", real=real, home="/home/u", workspace="/w")
    return time.thread_time() - began


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lines", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options.add_argument("--limit", type=float, default=0.05, help="seconds of thread CPU time that a line may take")
    given = options.parse_args()
    print(f"seed {given.seed}")
    slowest = fuzz(given.lines, given.seed)
    print(f"{given.lines} lines, the slowest took {slowest.seconds * 1000:.1f} ms: {slowest.line[:200]!r}")
    return 1 if slowest.seconds > given.limit else 0


if __name__ == "__main__":
    sys.exit(main())
