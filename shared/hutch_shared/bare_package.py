"""Imports of a package's modules without the package's own `__init__`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Inside the block, let `import name.module` run the module alone, without `name/__init__.py`.

    Use it for a package whose `__init__` imports far more than is needed. Afterwards the package is not imported yet:
    the next `import name` runs its `__init__`, which finds these modules. A package that is imported already
    stays as it is. ImportError if there is no such package. Not for several threads at once.
    """
    if name in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"no package {name}", name=name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]
