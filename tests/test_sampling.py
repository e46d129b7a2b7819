"""Of tests with a sample mark, a run without `full` keeps as many as the mark says, the same for the same seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.sampling import SEED

TOP = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.sampling import mark_unsampled

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_unsampled(items)
"""
FILE = """
import pytest
from tests.sampling import sample

pytestmark = sample(2)

@sample(3)
@pytest.mark.parametrize("case", range(20))
def test_cases(case): ...

@pytest.mark.parametrize("case", range(20))
def test_of_the_file(case): ...

def test_another_of_the_file(): ...

@pytest.mark.full
def test_too_long(): ...
"""


def collected(folder: Path, seed: int, marks: str) -> list[str]:
    """Return the names of the tests that a run with this seed and this `-m` collects."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_file.py").write_text(FILE)
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist")
    options = (
        *without,
        "-q",
        "--collect-only",
        "-c",
        str(TOP / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-m",
        marks,
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        env={"PATH": os.defpath, "PYTHONPATH": str(TOP), SEED: str(seed)},
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_a_mark_keeps_as_many_as_it_says(tmp_path: Path) -> None:
    """A test's own mark counts its cases, a file's mark its other tests; `full` has all, and another seed others."""
    one, again, other = (collected(tmp_path, seed, "not full") for seed in (1, 1, 2))
    kept = Counter(name.partition("[")[0] for name in one)

    assert kept["test_cases"] == 3
    assert kept.total() == 3 + 2
    assert one == again != other  # workers collect for themselves and must agree
    assert len(collected(tmp_path, 1, "full or not full")) == 20 + 20 + 2
