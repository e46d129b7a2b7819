"""Decides the isolation level of a session from the results of the probes. Pure.

| level | account other than hutchd's | own cgroup | sandbox with its own processes and view of the files |
|---|---|---|---|
| `strict` | yes | yes | yes |
| `account` | yes | yes | if the host allows it |
| `reduced` | at most one of these two | | if the host allows it |

A session that cannot have the requested level is refused, with a sentence about what is missing.
"""

from __future__ import annotations

from typing import Final

from hutch_daemon.environments.port import IsolationOffer
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["ORDER", "highest", "is_less", "level_of", "require_level"]

ORDER: Final[tuple[m.IsolationLevel, ...]] = ("reduced", "account", "strict")

_HOME: Final = {"tools": "the tools in its home", "read_only": "its home without its secrets", "hidden": "no home"}
_FORKER: Final = "A process that forks without end can outlive its session: neither a sandbox nor a cgroup holds it."
_NETWORK: Final = {
    "full": "It can reach the host's network.",
    "allow-list": "It can reach only the hosts that the settings allow.",
    "broker-only": "It can reach only its model.",
}


def highest(*levels: m.IsolationLevel | None) -> m.IsolationLevel:
    """Return the highest of the requested levels; `reduced` if none is requested."""
    return max((one for one in levels if one is not None), key=ORDER.index, default="reduced")


def is_less(level: m.IsolationLevel, than: m.IsolationLevel) -> bool:
    """Return whether a level is lower than another."""
    return ORDER.index(level) < ORDER.index(than)


def level_of(
    offer: IsolationOffer, sandbox: m.SandboxSpec | None, no_sandbox: str, asked: m.IsolationLevel, kind: str = ""
) -> m.Isolation:
    """Return the isolation of a session with this sandbox. Without a sandbox, `no_sandbox` is the reason.

    `asked` is the requested level; `kind` names the sandbox program in the text.
    """
    apart, cgroup = offer.separate_account, offer.cgroup
    why = [offer.why]
    if sandbox is not None:
        named = f" ({kind})" if kind else ""
        why.append(
            f"Each agent is in a sandbox{named}: it sees its working directory, read-only the system and"
            f" {_HOME[sandbox.home]}, and no process but its own. {_NETWORK[sandbox.network]}"
        )
    else:
        why.append(no_sandbox)
        if not cgroup:
            why.append(_FORKER)
    level: m.IsolationLevel = "reduced"
    missing = offer.missing
    if apart and cgroup:
        level, missing = ("strict", "") if sandbox is not None else ("account", no_sandbox)
    insiders = offer.insiders
    if sandbox is not None and not apart:
        insiders = (
            f"No agent can reach the client socket: its sandbox hides it. Other processes are recognised {insiders}"
        )
    return m.Isolation(level, " ".join(filter(None, why)), insiders, asked=asked, missing=missing)


def require_level(isolation: m.Isolation) -> None:
    """Raise `isolation_unavailable` if the level is lower than the requested one."""
    if isolation.asked is not None and is_less(isolation.level, isolation.asked):
        raise HutchError(
            Reason.ISOLATION_UNAVAILABLE,
            f"The session must have the isolation {isolation.asked} and could have only {isolation.level}:"
            f" {isolation.missing} `hutch doctor` says more.",
            level=isolation.level,
            asked=isolation.asked,
        )
