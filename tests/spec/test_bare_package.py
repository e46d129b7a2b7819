"""Modules are imported without the `__init__` of their package, and a later import gets the whole package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch_shared.bare_package import bare_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose `__init__` imports one module and sets a name."""
    folder = tmp_path / "package_of_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .part import VALUE\nTWICE = 2 * VALUE\n")
    (folder / "part.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def test_init_does_not_run(package: str) -> None:
    """Only the module itself is imported, and the package does not count as imported afterwards."""
    with bare_package(package):
        part = importlib.import_module(f"{package}.part")
        assert not hasattr(sys.modules[package], "TWICE")
    assert part.VALUE == 7
    assert package not in sys.modules


def test_a_later_import_gets_the_whole_package(package: str) -> None:
    """The whole package shares the modules that were imported before it."""
    with bare_package(package):
        part = importlib.import_module(f"{package}.part")
    whole = importlib.import_module(package)
    assert whole.TWICE == 14
    assert importlib.import_module(f"{package}.part") is part


def test_an_imported_package_stays(package: str) -> None:
    """A package that was imported before is neither replaced nor forgotten."""
    whole = importlib.import_module(package)
    with bare_package(package):
        assert sys.modules[package] is whole
    assert sys.modules[package] is whole


def test_unknown_packages_are_an_import_error() -> None:
    """The error names the package."""
    with pytest.raises(ImportError, match="no_package_of_that_name"), bare_package("no_package_of_that_name"):
        pass


CODE = """
import sys
from hutch_shared.methods import CLIENT
from hutch_shared.rpc.dispatch import Dispatcher
Dispatcher(CLIENT, {"list_sessions": print})
print(sorted({"jsonschema", "http.server", "jsonrpcserver.dispatcher"} & {*sys.modules}))
"""


def test_a_dispatcher_loads_no_more_than_it_uses() -> None:
    """jsonrpcserver's `__init__` would also import jsonschema and http.server."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "['jsonrpcserver.dispatcher']\n"
