"""What walls a session gets, how its key is kept with them, and the sentence that says why: decided here alone."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hutch_daemon.conductor.parts import PROVIDER_OF, Parts
from hutch_daemon.environments.port import Environment
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["Walling", "usual", "walling"]


@dataclass(frozen=True, slots=True)
class Walling:
    """What a session of an agent has."""

    sandbox: m.SandboxSpec | None
    keys: m.KeysKept
    isolation: m.Isolation


def walling(parts: Parts, environment: Environment, agent: str, cwd: str, home: str) -> Walling:
    """Return what a session of `agent` in `cwd` has by the settings in force, for an account with this home.

    `isolation_unavailable` when the settings accept no less than can be had.
    """
    having, settings = _having(parts, environment, agent, cwd, home), parts.settings()
    if having.keys == "exposed" and settings.keys.refuse_exposed:
        why = f"The settings refuse it: [keys] refuse_exposed. {having.isolation.keys_why}"
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    if having.keys != "none" and having.sandbox is None and settings.sandbox.mode == "require":
        why = f'The settings refuse it: [sandbox] mode = "require". {having.isolation.why}'
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
    return having


def usual(parts: Parts, environment: Environment) -> Walling:
    """Return what a session that needs a key has here if it works in a folder of its account's home."""
    return _having(parts, environment, next(iter(PROVIDER_OF)), cwd="/home/account/folder", home="/home/account")


def _having(parts: Parts, environment: Environment, agent: str, cwd: str, home: str) -> Walling:
    provider = PROVIDER_OF.get(agent)
    if provider is None:
        why = "What plays a script is not put into a sandbox; it needs no key."
        return Walling(None, "none", parts.walls.describe(environment.isolation(), None, why))
    sandbox, missing = parts.walls.around(cwd, home, parts.settings().sandbox)
    delivery, how = parts.grants.delivery(provider)
    keys: m.KeysKept = "brokered" if sandbox is not None and delivery == "lease" else "exposed"
    if keys == "brokered":
        why = f"{how} Nothing that could give it away is in the agent's reach."
    elif delivery == "direct":
        why = f"The key itself is handed to the agent. {how}"
    else:
        why = f"The agent could read what is Hutch's, and so the key. {missing}"
    isolation = parts.walls.describe(environment.isolation(), sandbox, missing)
    return Walling(sandbox, keys, msgspec.structs.replace(isolation, keys_why=why))
