"""What a session gets: its level of isolation, its walls, how its key is kept. Put together here from the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import anyio
import msgspec

from hutch_daemon.environments.levels import highest, level_of, require_level
from hutch_daemon.environments.port import Account, Environment, IsolationOffer
from hutch_daemon.environments.sandbox_probe import SandboxProbe
from hutch_daemon.services.parts import Parts
from hutch_shared import messages as m
from hutch_shared.agents import DEFAULT_AGENT, provider_of
from hutch_shared.errors import HutchError, Reason

__all__ = ["Walling", "least", "usual", "walling"]

_LOOKING: Final = 5.0
_LOOKS: Final = anyio.CapacityLimiter(8)
"""So many threads may hang on homes that do not answer."""


@dataclass(frozen=True, slots=True)
class Walling:
    """What a session of an agent has."""

    sandbox: m.SandboxSpec | None
    keys: m.KeysKept
    isolation: m.Isolation


def least(parts: Parts, asked: m.IsolationLevel | None) -> m.IsolationLevel:
    """Return the least that a session must have, by its opener's wish and the settings."""
    by_default: m.IsolationLevel = "account" if parts.about.mode == "system" else "reduced"
    return highest(parts.settings().isolation.require or by_default, asked)


async def walling(
    parts: Parts,
    environment: Environment,
    agent: str,
    cwd: str,
    account: Account,
    asked: m.IsolationLevel | None,
    *,
    grouped: bool = True,
) -> Walling:
    """Return what a session of `agent` in `cwd` has by the settings in force, for this account.

    `grouped=False`: its executor has no cgroup, whatever others get. `isolation_unavailable` when the settings, or who
    opened it, accept no less than can be had.
    """
    settings = parts.settings()
    walls = await environment.probe_sandbox(account) if settings.sandbox.mode != "off" else SandboxProbe()
    offer, level = environment.isolation_offered(), least(parts, asked)
    offer = replace(offer, cgroup=offer.cgroup and grouped)
    look = partial(_having, parts, offer, walls, agent, cwd, account.home, level)
    with anyio.move_on_after(_LOOKING) as scope:  # at a home that may lie on a dead server
        having = await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=_LOOKS)
    if scope.cancelled_caught:
        why = f"{account.home} does not answer: {account.name} cannot work there now."
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    require_level(having.isolation)
    if having.keys == "exposed" and settings.keys.refuse_exposed:
        why = f"The settings refuse it: [keys] refuse_exposed. {having.isolation.keys_why}"
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    if having.sandbox is None and settings.sandbox.mode == "require":
        why = f'The settings refuse it: [sandbox] mode = "require". {having.isolation.why}'
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    if having.keys != "none" and settings.sandbox.mode != "off" and (why := walls.lost()):
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)  # what is open was told that it has walls
    if having.sandbox is None and (network := settings.sandbox.network) != "full":
        why = f'The settings refuse it: [sandbox] network = "{network}" needs a sandbox. {having.isolation.why}'
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    return having


def usual(parts: Parts, environment: Environment, walls: SandboxProbe) -> Walling:
    """Return what a session that needs a key has here if it works in a folder of its account's home."""
    level = least(parts, None)
    return _having(
        parts, environment.isolation_offered(), walls, DEFAULT_AGENT, "/home/account/folder", "/home/account", level
    )


def _having(
    parts: Parts, offer: IsolationOffer, walls: SandboxProbe, agent: str, cwd: str, home: str, asked: m.IsolationLevel
) -> Walling:
    settings = parts.settings()
    provider = provider_of(agent)
    sandbox, missing = walls.spec_for(cwd, home, settings.sandbox)
    wanted = asked == "strict" or settings.sandbox.mode == "require" or settings.sandbox.network != "full"
    if provider is None and not wanted:
        sandbox, missing = None, "What plays a script is put into a sandbox only where one is asked for."
    isolation = level_of(offer, sandbox, missing, asked, walls.why)
    isolation = msgspec.structs.replace(isolation, limits=parts.bounds(offer.cgroup))
    if provider is None:
        return Walling(sandbox, "none", isolation)
    delivery, how = parts.grants.delivery(provider)
    keys: m.KeysKept = "exposed"
    if delivery == "direct":
        why = f"The key itself is handed to the agent. {how}"
    elif offer.separate_account or sandbox is not None:
        keys, why = "brokered", f"{how} Nothing that could give it away is in the agent's reach."
    else:
        why = f"The agent could read what is Hutch's, and so the key. {missing}"
    return Walling(sandbox, keys, msgspec.structs.replace(isolation, keys_why=why))
