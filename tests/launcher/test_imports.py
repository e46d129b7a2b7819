"""The launcher stands alone: whatever else is installed on a host, root runs nothing of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hutch_launcher

FOLDER = Path(hutch_launcher.__file__).parent


def imported(path: Path) -> set[str]:
    """Return the top-level names of all that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add((node.module or "").partition(".")[0])
    return found


def test_it_imports_the_standard_library_and_itself() -> None:
    """No module of it names another package."""
    modules = sorted(FOLDER.rglob("*.py"))
    names = set().union(*map(imported, modules))

    assert len(modules) <= 4, "it is read in one sitting"
    assert names - {"hutch_launcher"} <= sys.stdlib_module_names


def test_it_runs_without_any_package() -> None:
    """Not even by way of the standard library is anything else loaded."""
    script = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(FOLDER.parent)!r}]\n"
        "before = set(sys.modules)\n"
        "import hutch_launcher.__main__\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) - {"hutch_launcher"} <= sys.stdlib_module_names
