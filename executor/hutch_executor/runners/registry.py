"""Which module drives which agent. It is imported when an executor for that agent starts, not before."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from hutch_executor.runners.port import AgentRunner
from hutch_shared.errors import HutchError, Reason

__all__ = ["RUNNERS", "load_runner"]

RUNNERS: Final[dict[str, str]] = {
    "claude": "hutch_executor.runners.claude.runner:ClaudeRunner",
    "script": "hutch_executor.runners.script:ScriptRunner",
}


def load_runner(agent: str) -> type[AgentRunner]:
    """Import and return the runner class for `agent`; `agent_unavailable` when there is none, or it does not import."""
    if agent not in RUNNERS:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"No agent is called {agent!r}; there are: {', '.join(RUNNERS)}.")
    module, _, name = RUNNERS[agent].partition(":")
    try:
        runner = getattr(import_module(module), name)
    except ImportError as error:
        raise HutchError(
            Reason.AGENT_UNAVAILABLE, f"What drives {agent} is not installed here ({error.name or 'unknown module'})."
        ) from error
    return cast("type[AgentRunner]", runner)
