"""Matches a tool's name with the rules. Pure.

A rule that allows must cover the tool as one of each MCP server that it may be of: of the session's servers whose name
begins the tool's name or, where these are not known, of every server that the name can be read to have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hutch_daemon.permissions import suggestions
from hutch_daemon.permissions.assessment import Assessment, RuleHit
from hutch_daemon.permissions.layers import Policy, RuleSet
from hutch_shared.messages import ToolCall
from hutch_shared.vocabulary import mcp_readings

__all__ = ["assess_name"]

_SHOWN = 200
"""Characters of a name that a sentence repeats."""


def assess_name(policy: Policy, call: ToolCall, mcp_servers: Collection[str] | None) -> Assessment:
    """Match the name of the call's tool. `mcp_servers` are the session's; None if they are not known."""
    name, readings = call.agent_tool, mcp_readings(call.agent_tool, mcp_servers)
    if not name.startswith("mcp__") and call.action == "mcp" and call.server and call.tool:
        # an agent that names the server apart
        name, readings = f"mcp__{call.server}__{call.tool}", ((call.server, call.tool),)
    servers: list[str | None] = [server for server, _ in readings]
    unclear = None
    if not name.startswith("mcp__"):
        servers = [None]
    elif (unclear := _unclear_server(name, readings)) is not None:
        servers = []
    hits = [_first(policy.allow, name, [server]) for server in servers]
    allowed = tuple(hit for hit in hits if hit is not None)
    missing = next((server for server, hit in zip(servers, hits, strict=True) if hit is None), None)
    proposal = None
    if unclear is None and call.action in {"mcp", "other", "search"}:
        proposal = suggestions.of_tool(name)
    perhaps: list[str | None] = [*servers] or [server for server, _ in mcp_readings(name, None)] or [None]
    refused = f"no rule allows the tool {name[:_SHOWN]}"
    if allowed and missing is not None:
        refused = f"the tool may be of the MCP server {missing[:_SHOWN]}, and no rule allows {name[:_SHOWN]} there"
    return Assessment(
        denied=_first(policy.deny, name, perhaps),
        asked=_first(policy.ask, name, perhaps),
        allowed=allowed if servers and len(allowed) == len(servers) else None,
        refused=unclear or refused,
        suggestions=() if proposal is None else (proposal,),
    )


def _first(rules: RuleSet, name: str, servers: Iterable[str | None]) -> RuleHit | None:
    """Return the first rule that covers the tool as one of any of these servers."""
    hits = (RuleHit(rule.origin, name) for server in servers for rule in rules.names if rule.covers(name, server))
    return next(hits, None)


def _unclear_server(name: str, readings: Sequence[tuple[str, str]]) -> str | None:
    """Return the reason why it is not clear whose tool it is, so that no rule can allow it; None if it is clear."""
    if not readings:
        return f"the session has no MCP server of which {name[:_SHOWN]} could be a tool"
    if len(set(readings)) < len(readings):
        return f"two MCP servers of the session have the same name in {name[:_SHOWN]}"
    return None
