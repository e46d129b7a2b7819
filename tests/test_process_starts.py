"""scripts/process_starts.py: which code starts processes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def rule() -> ModuleType:
    """The script as a module."""
    return load_script("process_starts")


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\ndef go():\n    subprocess.run(['git'])\n",
        "import subprocess as sp\ndef go():\n    sp.Popen('x')\n",
        "from subprocess import check_output as out\ndef go():\n    return out('x')\n",
        "def go():\n    import os\n    os.execv('/x', [])\n",
        "import os\ndef go():\n    other(os.fork)\n",
        "from os import posix_spawn\ndef go():\n    posix_spawn('/x', [], {})\n",
        "import anyio\nasync def go():\n    await anyio.run_process(['x'])\n",
        "import asyncio\nasync def go():\n    await asyncio.create_subprocess_exec('x')\n",
        "import pty\ndef go():\n    pty.spawn('x')\n",
        "from hutch_executor.account.commands import run_command\nasync def go():\n    await run_command([], id)\n",
    ],
)
def test_a_start_is_found_under_any_name(rule: ModuleType, tmp_path: Path, source: str) -> None:
    """It is named with its module, its function and its line, also if only the function is handed on."""
    (tmp_path / "one.py").write_text(source)
    (found,) = rule.found_in(tmp_path / "one.py", tmp_path)

    assert found.place == "one.py:go"
    assert found.name in rule.INSTEAD or "." in found.name


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\ndef go(child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:\n    return child\n",
        "import subprocess\nPIPE = subprocess.PIPE\nERRORS = subprocess.TimeoutExpired\n",
        "import os\nos.environ.get('x')\n",
        "def run():\n    run()\n",
    ],
)
def test_types_and_constants_are_no_starts(rule: ModuleType, tmp_path: Path, source: str) -> None:
    """A module may name the type of a process and the errors."""
    (tmp_path / "one.py").write_text(source)

    assert list(rule.found_in(tmp_path / "one.py", tmp_path)) == []


def test_every_start_is_listed_with_its_reason(rule: ModuleType) -> None:
    """Hutch's code starts processes only where the table says so, and each row is in use."""
    found = list(rule.findings(rule.TOP, rule.PACKAGES, rule.ALLOWED))

    assert found == []
    assert all(why and folder for why, folder in rule.ALLOWED.values())


def test_a_new_start_fails_with_the_function_to_use(rule: ModuleType, tmp_path: Path) -> None:
    """So does a row whose place starts nothing any more."""
    (tmp_path / "one.py").write_text("import subprocess\nsubprocess.run(['git', 'diff'])\n")
    new, gone = rule.findings(tmp_path, (".",), {"gone.py:go": ("why", "/")})

    assert new.startswith("one.py:module:2: subprocess.run starts a process.")
    assert "run_in_project" in new
    assert gone.startswith("gone.py:go: ")
