"""The project's scripts that are written in Python, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["load_script"]

_SCRIPTS: Final = Path(__file__).parents[1] / "scripts"


def load_script(name: str) -> ModuleType:
    """Import `scripts/NAME.py`, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(name, _SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
