"""Of tests with a sample mark, a run without `full` keeps as many as the mark says, the same for the same seed."""

from __future__ import annotations

import json
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


COLLECT = """
import json, os, sys
import pytest

class Names:
    def pytest_collection_finish(self, session):
        names.append([item.nodeid.partition("::")[2] for item in session.items])

names = []
for seed, marks in json.loads(sys.argv[1]):
    os.environ[SEED] = str(seed)
    pytest.main(["-q", "--collect-only", "-m", marks, *sys.argv[2:]], [Names()])
print(json.dumps(names))
"""


def collected(folder: Path, *runs: tuple[int, str]) -> list[list[str]]:
    """Return the names of the tests that runs collect, each with a seed and `-m`."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_file.py").write_text(FILE)
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist")
    options = (*without, "-c", str(TOP / "pyproject.toml"), "--rootdir", str(folder), str(folder))
    done = subprocess.run(
        [sys.executable, "-c", COLLECT.replace("SEED", repr(SEED)), json.dumps(runs), *options],
        env={"PATH": os.defpath, "PYTHONPATH": str(TOP)},
        capture_output=True, text=True, check=True, cwd=folder,
    )  # fmt: skip
    names: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_a_mark_keeps_as_many_as_it_says(tmp_path: Path) -> None:
    """A test's own mark counts its cases, a file's mark its other tests; `full` has all, and another seed others."""
    one, again, other, full = collected(
        tmp_path, (1, "not full"), (1, "not full"), (2, "not full"), (1, "full or not full")
    )
    kept = Counter(name.partition("[")[0] for name in one)

    assert kept["test_cases"] == 3
    assert kept.total() == 3 + 2
    assert one == again != other  # each pytest-xdist worker collects the tests itself; all must find the same
    assert len(full) == 20 + 20 + 2
