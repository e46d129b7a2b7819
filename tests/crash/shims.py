"""Libraries for LD_PRELOAD, compiled where the tests run; and what a test may demand of its host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["compiled", "demand"]


def demand(there: object, what: str) -> None:
    """Skip the test where the host lacks something; in CI that is a failure."""
    if not there:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"this host lacks {what}")


def compiled(source: Path, folder: Path) -> Path:
    """Compile `source` to a shared library in `folder`."""
    demand(shutil.which("cc"), "a C compiler")
    library = folder / source.with_suffix(".so").name
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(source)], check=True)
    return library
