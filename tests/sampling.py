"""Samples: of several tests of one kind, CI runs a few that a seed chooses, and `scripts/test full` runs all.

`@sample(3)` above a test keeps three of its cases; `sample(3)` in a file's `pytestmark` keeps three of the file's tests
that have no sample of their own. The others are marked `full`.

The seed is that of the whole run; its header prints it, and `HUTCH_TEST_SEED` repeats it.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Iterable
from random import Random
from typing import Final

import pytest

__all__ = ["SEED", "mark_unsampled", "sample", "seed"]

SEED: Final = "HUTCH_TEST_SEED"
_MARK: Final = "sample"


def seed() -> int:
    """Return the run's seed; the first call chooses one for this process and all that it starts."""
    return int(os.environ.setdefault(SEED, str(secrets.randbelow(1 << 32))))


def sample(count: int) -> pytest.MarkDecorator:
    """Return the mark for tests of which CI runs only `count`."""
    return pytest.mark.sample(count)


def mark_unsampled(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` the tests with a sample mark that this run's seed does not choose."""
    groups: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        node, mark = next(item.iter_markers_with_node(_MARK), (None, None))
        if mark is None or item.get_closest_marker("full"):
            continue
        name = node.nodeid if isinstance(node, pytest.Module) else item.nodeid.partition("[")[0]
        groups[name, mark.args[0]].append(item)
    for (name, count), members in groups.items():
        chosen = {item.nodeid for item in Random(f"{seed()} {name}").sample(members, min(count, len(members)))}
        for item in members:
            if item.nodeid not in chosen:
                item.add_marker(pytest.mark.full)
