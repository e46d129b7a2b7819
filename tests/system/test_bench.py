"""The benches and the soak run and print their figures; the figures are not judged here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from scripts.benching.measure import EFFORTS, percentile
from scripts.benching.soak import Sample, soak, verdict
from scripts.benching.wire import frame
from tests.sampling import sample

pytestmark = pytest.mark.system

CASES = {
    "rpc": 8,
    "floods": 3,
    "relay": 18,
    "prompt": 3,
    "stream": 2,
    "memory": 4,
    "ps": 2,
    "judge": 2,
    "broker": 7,
    "sandbox": 4,
}


@sample(1)
@pytest.mark.parametrize("name", CASES)
async def test_a_bench_runs_and_gives_a_figure_for_each_case(name: str) -> None:
    """Each bench uses real processes; each output line names a case and has a ratio."""
    said: list[tuple[str, str, float]] = []

    def say(bench: str, case: str, ratio: float, aim: Any = None, **figures: Any) -> None:
        said.append((bench, case, ratio))

    await importlib.import_module(f"scripts.benching.{name}").bench(EFFORTS["tiny"], say)

    assert len({case for _, case, _ in said}) == len(said) == CASES[name]
    assert {bench for bench, _, _ in said} == {name}
    assert all(ratio >= 0 for _, _, ratio in said)


@pytest.mark.full
async def test_the_bench_of_a_stalled_follower_runs() -> None:
    """Nine followers get every event beside one that does not read."""
    said: list[float] = []

    def say(bench: str, case: str, ratio: float, aim: Any = None, **figures: Any) -> None:
        said.append(ratio)

    await importlib.import_module("scripts.benching.relay").bench_stalled(EFFORTS["tiny"], say)

    assert len(said) == 1


@pytest.mark.full
async def test_a_soak_of_a_few_seconds_is_flat() -> None:
    """hutchd keeps nothing of sessions, of followers that come and go, or of stalled followers."""
    assert await soak(20)


def test_a_soak_names_the_quantities_that_grew() -> None:
    """It compares the end of the run with its beginning."""
    samples = [Sample(n, 40 + 10 * n, 8, 50 << 20, 0, 4, n, 100 * n) for n in range(9)]

    found = verdict(samples)

    assert found["verdict"] == "grows"
    assert [name for name, one in found.items() if name != "verdict" and not one["flat"]] == ["descriptors"]


def test_a_percentile_is_the_value_at_its_rank() -> None:
    """The 99th percentile of a hundred values is the second largest."""
    assert percentile(range(100), 0.99) == 99
    assert percentile([3, 1, 2], 0.5) == 2


def test_a_request_is_one_line() -> None:
    """The benches encode requests as compactly as the client does."""
    assert frame("ping", 7) == b'{"jsonrpc":"2.0","method":"ping","id":7}\n'
