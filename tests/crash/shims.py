"""Libraries for LD_PRELOAD, compiled when the tests run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.programs import required_program

__all__ = ["compiled"]


def compiled(source: Path, folder: Path) -> Path:
    """Compile `source` to a shared library in `folder`."""
    library = folder / source.with_suffix(".so").name
    subprocess.run(
        [required_program("cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(source)],
        check=True,
    )
    return library
