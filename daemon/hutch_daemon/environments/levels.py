"""Decides the isolation level of a session from the results of the probes. Pure.

| level | account other than hutchd's | own cgroup | sandbox |
|---|---|---|---|
| `strict` | yes | yes | bubblewrap: its own processes and view of the files |
| `account` | yes | yes | Landlock, or none |
| `reduced` | at most one of these two | | any, or none |

A session that cannot have the requested level is refused, with a sentence about what is missing.
"""

from __future__ import annotations

from typing import Final

from hutch_daemon.environments.port import IsolationOffer
from hutch_daemon.environments.sandbox_probe import SandboxChoice
from hutch_shared import messages as m
from hutch_shared.attacks import open_attacks
from hutch_shared.errors import HutchError, Reason

__all__ = ["ORDER", "highest", "is_less", "level_of", "require_level"]

ORDER: Final[tuple[m.IsolationLevel, ...]] = ("reduced", "account", "strict")

_HOME: Final = {"tools": "the tools in its home", "read_only": "its home without its secrets", "hidden": "no home"}
_FORKER: Final = (
    "A process that forks without end can outlive its session: neither a process namespace nor a cgroup holds it."
)
_SIGNALS_ABI: Final = 6
"""The first Landlock ABI that keeps signals inside."""
_NETWORK: Final = {
    "full": "It can reach the host's network.",
    "allow-list": "It can reach only its model, without the provider's tools, and the hosts that the settings allow.",
    "broker-only": "It can reach only its model, without the provider's tools.",
}


def highest(*levels: m.IsolationLevel | None) -> m.IsolationLevel:
    """Return the highest of the requested levels; `reduced` if none is requested."""
    return max((one for one in levels if one is not None), key=ORDER.index, default="reduced")


def is_less(level: m.IsolationLevel, than: m.IsolationLevel) -> bool:
    """Return whether a level is lower than another."""
    return ORDER.index(level) < ORDER.index(than)


def level_of(offer: IsolationOffer, choice: SandboxChoice, asked: m.IsolationLevel) -> m.Isolation:
    """Return the isolation of a session with this sandbox, or without one. `asked` is the requested level."""
    apart, cgroup, sandbox = offer.separate_account, offer.cgroup, choice.spec
    has_namespaces = sandbox is not None and sandbox.kind == "bubblewrap"
    why = [offer.why, choice.why if sandbox is None else _sandbox_words(sandbox, choice)]
    if not has_namespaces and not cgroup:
        why.append(_FORKER)
    level: m.IsolationLevel = "reduced"
    missing = [offer.missing, choice.more]
    if apart and cgroup:
        level = "strict" if has_namespaces else "account"
        missing = [] if has_namespaces else [choice.more or choice.why]
    insiders = offer.insiders
    if sandbox is not None and not apart:
        insiders = (
            f"No agent can reach the client socket: its sandbox hides it. Other processes are recognised {insiders}"
            if has_namespaces
            else "No command of an agent can reach the client socket: it can open no Unix socket. The agent's own"
            f" program and other processes are recognised {insiders}"
        )
    return m.Isolation(
        level,
        " ".join(filter(None, why)),
        insiders,
        asked=asked,
        missing=" ".join(filter(None, missing)),
        sandbox=None if sandbox is None else sandbox.kind,
        network="full" if sandbox is None else sandbox.network,
        open=open_attacks(
            None if sandbox is None else sandbox.kind,
            own_account=not apart,
            network="full" if sandbox is None else sandbox.network,
            abi=choice.abi,
        ),
    )


def _sandbox_words(sandbox: m.SandboxSpec, choice: SandboxChoice) -> str:
    """Return sentences about what an agent in this sandbox sees and reaches."""
    named = f" ({choice.named})" if choice.named else ""
    places = f"its working directory, read-only the system and {_HOME[sandbox.home]}"
    network = _NETWORK[sandbox.network]
    if sandbox.kind == "bubblewrap":
        return f"Each agent is in a sandbox{named}: it sees {places}, and no process but its own. {network}"
    signals = "" if choice.abi >= _SIGNALS_ABI else ", and can signal other processes of its account"
    return (
        f"Each agent is in a sandbox{named}: it can open {places}. Its HOME and TMPDIR are the session's own. It has no"
        f" process namespace: it sees the names of the host's processes and of hidden files{signals}. {network}"
    )


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
