"""The launcher uses the standard library only: root runs no other package that is installed on a host."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hutch_launcher

FOLDER = Path(hutch_launcher.__file__).parent


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add((node.module or "").partition(".")[0])
    return found


def test_it_imports_only_the_standard_library_and_itself() -> None:
    """It is also short enough to be read in one sitting."""
    modules = sorted(FOLDER.rglob("*.py"))
    names = set().union(*map(imported, modules))

    assert sum(len(path.read_text().splitlines()) for path in modules) <= 1650
    assert names - {"hutch_launcher"} <= sys.stdlib_module_names


def test_it_loads_no_other_package() -> None:
    """The standard library loads no other package for it."""
    script = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(FOLDER.parent)!r}]\n"
        "before = set(sys.modules)\n"
        "import hutch_launcher.__main__\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) - {"hutch_launcher"} <= sys.stdlib_module_names
