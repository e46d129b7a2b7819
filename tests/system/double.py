"""A Python whose Claude CLI is the double: a hutchd or executor under it starts the double. Nothing else differs.

It is a virtual environment on top of this one. Its only package is claude-agent-sdk, as links to the real files, with
the double in the place of the SDK's own CLI.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import claude_agent_sdk

from tests.rehearsal.double import claude

__all__ = ["double_cli", "double_python", "remove"]

_made: list[Path] = []
"""The folders that exist."""

_START = "#!{python} -IS\nimport sys\nsys.path.insert(0, {folder!r})\nfrom claude import run\nrun()\n"


@cache
def double_cli() -> Path:
    """Return the double as a program that is started as the CLI is; `remove` removes it."""
    return _install(_folder() / "bundled")


@cache
def double_python() -> Path:
    """Return the interpreter; `remove` removes its environment."""
    root = _folder()
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    sdk, real = packages / "claude_agent_sdk", Path(claude_agent_sdk.__file__).parent
    sdk.mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name != "_bundled":
            (sdk / entry.name).symlink_to(entry)
    _install(sdk / "_bundled")
    rest = sysconfig.get_path("purelib")
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({rest!r})\n")
    (root / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(base)
    return python


def _folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="hutch-double-"))
    _made.append(made)
    return made


def remove() -> None:
    """Remove the doubles of this process, at the end of its tests."""
    double_cli.cache_clear()
    double_python.cache_clear()
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)


def _install(folder: Path) -> Path:
    """Put the double into a new folder, compiled: compiling takes longer than the rest of its start."""
    folder.mkdir()
    shutil.copy(claude.__file__, folder / "claude.py")
    compileall.compile_dir(folder, quiet=2)
    program = folder / "claude"
    program.write_text(_START.format(python=Path(sys.executable).resolve(), folder=str(folder)))
    program.chmod(0o755)
    return program
