"""Hutch's own programs that run inside a sandbox: the interpreter, this code, the network bridge, the confinement."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from hutch_executor.sandbox import confine, netns_bridge

__all__ = ["INTERPRETER", "PROGRAMS", "PROXY_PORT", "bridge_argv", "confine_argv"]

PROXY_PORT: Final = 18118
"""The proxy's port inside the sandbox. Only the agent's own servers share that loopback interface."""
PROGRAMS: Final = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
"""Read-only places: the interpreter and this code. The agent may not change them, even in its working directory."""

INTERPRETER: Final = (os.path.realpath(sys.executable), "-I", "-S")
"""The interpreter for a program by itself: no packages, and nothing of the environment or the working directory."""


def confine_argv(instructions: bytes, ruleset: int | None = None, supervisor: int | None = None) -> tuple[str, ...]:
    """Return the command that goes before another one and confines it; see `confine` for the arguments."""
    ruleset_text, supervisor_text = ("-" if one is None else str(one) for one in (ruleset, supervisor))
    return (*INTERPRETER, confine.PROGRAM, ruleset_text, instructions.hex(), supervisor_text)


def bridge_argv(descriptor: int) -> tuple[str, ...]:
    """Return the command that goes before a sandboxed one and gives it the proxy; see `netns_bridge`."""
    return (*INTERPRETER, str(Path(netns_bridge.__file__)), str(descriptor), str(PROXY_PORT))
