"""The benches and the soak run, and say what they should: what they measure is not judged here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from scripts.benching.measure import EFFORTS, percentile
from scripts.benching.soak import Sample, soak, verdict
from scripts.benching.wire import frame
from tests.sampling import sampled

pytestmark = pytest.mark.system

CASES = {"rpc": 8, "floods": 3, "relay": 18, "prompt": 3, "stream": 2, "memory": 4, "ps": 2, "judge": 2, "broker": 7}


@pytest.mark.parametrize("name", sampled(CASES, 2, name="bench"))
async def test_a_bench_runs_and_gives_a_figure_for_each_case(name: str) -> None:
    """Each bench works on real processes, and each of its lines names a case and has a ratio."""
    said: list[tuple[str, str, float]] = []

    def say(bench: str, case: str, ratio: float, aim: Any = None, **figures: Any) -> None:
        said.append((bench, case, ratio))

    await importlib.import_module(f"scripts.benching.{name}").bench(EFFORTS["tiny"], say)

    assert len({case for _, case, _ in said}) == len(said) == CASES[name]
    assert {bench for bench, _, _ in said} == {name}
    assert all(ratio >= 0 for _, _, ratio in said)


@pytest.mark.full
async def test_the_bench_of_a_stalled_follower_runs() -> None:
    """Nine followers get all of it beside one that does not read."""
    said: list[float] = []

    def say(bench: str, case: str, ratio: float, aim: Any = None, **figures: Any) -> None:
        said.append(ratio)

    await importlib.import_module("scripts.benching.relay").bench_stalled(EFFORTS["tiny"], say)

    assert len(said) == 1


@pytest.mark.full
async def test_a_soak_of_a_few_seconds_is_flat() -> None:
    """Sessions, followers that come and go and some that do not read leave nothing behind in hutchd."""
    assert await soak(20)


def test_what_grows_is_named() -> None:
    """The verdict compares the end of the run with its beginning, quantity by quantity."""
    samples = [Sample(n, 40 + 10 * n, 8, 50 << 20, 0, 4, n, 100 * n) for n in range(9)]

    found = verdict(samples)

    assert found["verdict"] == "grows"
    assert [name for name, one in found.items() if name != "verdict" and not one["flat"]] == ["descriptors"]


def test_a_percentile_is_the_value_at_its_rank() -> None:
    """The 99th of a hundred values is the largest but none."""
    assert percentile(range(100), 0.99) == 99
    assert percentile([3, 1, 2], 0.5) == 2


def test_a_request_is_one_line() -> None:
    """What the benches send is written in the shortest way, as the client does."""
    assert frame("ping", 7) == b'{"jsonrpc":"2.0","method":"ping","id":7}\n'
