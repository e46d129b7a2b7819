"""Hutch's own programs that run inside a sandbox: the interpreter, this code, the network bridge."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from hutch_executor.sandbox import netns_bridge

__all__ = ["PROGRAMS", "PROXY_PORT", "bridge_argv"]

PROXY_PORT: Final = 18118
"""The proxy's port inside the sandbox. Only the agent's own servers share that loopback interface."""
PROGRAMS: Final = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
"""Read-only places: the interpreter and this code. The agent may not change them, even in its working directory."""


def bridge_argv(descriptor: int) -> tuple[str, ...]:
    """Return the command that goes before a sandboxed one and gives it the proxy; see `netns_bridge`."""
    interpreter = os.path.realpath(sys.executable)
    return (interpreter, "-I", "-S", str(Path(netns_bridge.__file__)), str(descriptor), str(PROXY_PORT))
