"""The agents that Hutch runs: the one table that hutchd, the executor and the client read.

An agent is a row here and a runner module in `hutch_executor/runners`. The module is imported only when an executor
for that agent starts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["AGENTS", "DEFAULT_AGENT", "SCRATCH", "Agent", "keeps_conversation", "provider_of"]


SCRATCH: Final = "hutch-scratch"
"""The folder of temporary files in the directory of a session's agent. No agent's program uses this name."""


class Agent(NamedTuple):
    """One kind of agent."""

    display: str
    """The agent's name in sentences."""
    summary: str
    """One line for help texts and completion."""
    provider: str | None
    """The provider whose API key the agent needs; None if it needs none."""
    runner: str
    """The class that drives it, as `module:class`."""
    conversation: bool
    """Whether it keeps a conversation: one that can be compacted and cleared, and shows which prompts it contains."""


AGENTS: Final[dict[str, Agent]] = {
    "claude": Agent(
        display="Claude Code",
        summary="Claude Code",
        provider="anthropic",
        runner="hutch_executor.runners.claude.runner:ClaudeRunner",
        conversation=True,
    ),
    "script": Agent(
        display="the script runner",
        summary="plays a file of JSON lines; needs no key",
        provider=None,
        runner="hutch_executor.runners.script:ScriptRunner",
        conversation=False,
    ),
}

DEFAULT_AGENT: Final = "claude"


def provider_of(agent: str) -> str | None:
    """Return the provider whose key `agent` needs; None if it needs none, or is unknown."""
    return AGENTS[agent].provider if agent in AGENTS else None


def keeps_conversation(agent: str) -> bool:
    """Return whether `agent` keeps a conversation; False if it is unknown."""
    return agent in AGENTS and AGENTS[agent].conversation
