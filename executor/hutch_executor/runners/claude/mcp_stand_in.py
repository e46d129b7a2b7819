"""Stand-ins for the package `mcp`, which the SDK imports and executors never use.

The SDK imports `mcp` for MCP servers that run inside its own process (`create_sdk_mcp_server`). Hutch has none: the CLI
starts the MCP servers of a session. `mcp` brings pydantic, starlette, uvicorn and httpx, which is more than half of the
start of an executor and 23 MiB of its memory (claude-agent-sdk 0.2.189 with mcp 1.30).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Unused:
    """Base of the stand-ins of the classes of `mcp`: they can be imported, annotated and inherited from, not called."""

    def __new__(cls, *_arguments: Any, **_named: Any) -> Unused:
        """Raise RuntimeError: a stand-in cannot be instantiated."""
        raise RuntimeError("executors do not load the package mcp: MCP servers run outside the SDK")

    def __init_subclass__(cls, **_options: Any) -> None:
        """Take the options of any class statement."""


class _StandIn(ModuleType):
    """A module in which every public name is a class of its own."""

    def __getattr__(self, name: str) -> type[Unused]:
        """Return a class without behaviour. AttributeError for names that the import system looks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Unused,), {})
        setattr(self, name, value)
        return value


class StandInFinder(MetaPathFinder, Loader):
    """Finds a stand-in for `mcp` and every module below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the stand-in's spec, or None for all other modules."""
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".", 1)[0] == "mcp" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names appear when they are looked up."""


def install() -> None:
    """Put the finder before all others, once. A process that has imported the real `mcp` keeps it."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
