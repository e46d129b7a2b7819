"""Loads the runner of an agent: its module is imported when an executor for that agent starts, not before."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from hutch_executor.runners.port import AgentRunner
from hutch_shared.agents import AGENTS
from hutch_shared.errors import HutchError, Reason

__all__ = ["load_runner"]


def load_runner(agent: str) -> type[AgentRunner]:
    """Import and return the runner class of `agent`; `agent_unavailable` if it is unknown or cannot be imported."""
    if agent not in AGENTS:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"No agent is called {agent!r}; known: {', '.join(AGENTS)}.")
    module, _, name = AGENTS[agent].runner.partition(":")
    try:
        runner = getattr(import_module(module), name)
    except ImportError as error:
        raise HutchError(
            Reason.AGENT_UNAVAILABLE,
            f"The runner of {AGENTS[agent].display} is not installed here ({error.name or 'unknown module'}).",
        ) from error
    return cast("type[AgentRunner]", runner)
