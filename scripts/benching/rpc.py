"""A call through hutchd's client socket, against the smallest server that answers a line of JSON."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from hutch_shared.messages import PROTOCOL
from scripts.benching.measure import Effort, Say, cpu_of, median, percentile
from scripts.benching.stage import program
from scripts.benching.wire import Line
from tests.system.host import host

__all__ = ["bench"]

_AIM: Final = ("<=", 4.5)
_SETTINGS: Final = "[executors]\nspares = 0\n[sockets]\nping_interval = 600.0\n"
_CASES: Final[list[tuple[str, dict[str, Any] | None]]] = [
    ("ping", None),  # answered by the connection itself
    ("get_version", {"protocol": PROTOCOL, "client": "bench"}),  # passes the dispatcher and the gate
]
_CALLS: Final = 20_000
_IDLE: Final = 1000


async def bench(effort: Effort, say: Say) -> None:
    """Measure both servers beside idle connections, with one call in flight and with many."""
    async with host(_SETTINGS) as made:
        bare = made.root / "echo.sock"
        async with program("echo", bare) as echo:
            await echo.line()
            with ExitStack() as stack:
                lines = {path: stack.enter_context(Line(path)) for path in (made.socket, bare)}
                idle = _IDLE if effort.rounds > 1 else 20
                for path in lines:
                    for _ in range(idle):
                        stack.enter_context(Line(path)).ask("ping")
                for method, params in _CASES:
                    for in_flight in (1, 64):
                        case = f"{method}, {in_flight} in flight, {idle} idle connections"
                        _compare(effort, say, case, (lines, {made.socket: made.pid, bare: echo.pid}), method, params,
                                 in_flight)  # fmt: skip


def _compare(
    effort: Effort,
    say: Say,
    case: str,
    servers: tuple[dict[Path, Line], dict[Path, int]],
    method: str,
    params: dict[str, Any] | None,
    in_flight: int,
) -> None:
    lines, pids = servers
    ours, bare = lines
    count = effort.of(_CALLS, in_flight)
    taken: dict[Path, list[list[float]]] = {ours: [], bare: []}
    cpu: dict[Path, list[float]] = {ours: [], bare: []}
    for line in lines.values():
        line.ask_many(method, params, in_flight + count // 10, in_flight)
    for _ in range(effort.rounds):
        for path, line in lines.items():
            before = cpu_of(pids[path])
            taken[path].append(line.ask_many(method, params, count, in_flight))
            cpu[path].append((cpu_of(pids[path]) - before) / count)
    p50 = {path: [median(one) for one in rounds] for path, rounds in taken.items()}
    p99 = {path: [percentile(one, 0.99) for one in rounds] for path, rounds in taken.items()}

    def ratio(values: dict[Path, list[float]]) -> float:
        return median([a / b for a, b in zip(values[ours], values[bare], strict=True)])

    say("rpc", f"{case}: p50", ratio(p50), _AIM, us=1e6 * median(p50[ours]), bare_us=1e6 * median(p50[bare]),
        p99_ratio=ratio(p99), p99_us=1e6 * median(p99[ours]), bare_p99_us=1e6 * median(p99[bare]))  # fmt: skip
    say("rpc", f"{case}: CPU", ratio(cpu), _AIM, us=1e6 * median(cpu[ours]), bare_us=1e6 * median(cpu[bare]))
