"""Plans how a session is isolated: its isolation level, its sandbox and how its key is kept, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import anyio
import msgspec

from hutch_daemon.environments.levels import highest, is_less, level_of, require_level
from hutch_daemon.environments.port import Account, Environment, IsolationOffer
from hutch_daemon.environments.sandbox_probe import SandboxChoice, SandboxProbe, kinds_of
from hutch_daemon.settings import LimitSettings, SettingsInForce
from hutch_shared import messages as m
from hutch_shared.agents import DEFAULT_AGENT, provider_of
from hutch_shared.errors import HutchError, Reason

__all__ = ["IsolationPlan", "IsolationPlanner"]

_HOME_TIMEOUT: Final = 5.0
"""Seconds to wait for the file system of a home, which may be a file server that is down."""
_HOME_THREADS: Final = anyio.CapacityLimiter(8)
"""The limit of threads that wait for the file systems of homes."""

Delivery = Callable[[str], tuple[m.Delivery, str]]
"""Takes a provider; returns how executors get its keys, and a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    """The isolation of one session: its sandbox, how its key is kept, and the level with its reasons."""

    sandbox: m.SandboxSpec | None
    keys: m.KeysKept
    isolation: m.Isolation
    probe: SandboxProbe
    """What the sandbox was chosen by."""
    is_lost: bool = False
    """It has no sandbox, since one that held before stopped to hold without a visible reason."""


class IsolationPlanner:
    """Plans the isolation of sessions from the settings and the environment's probes."""

    def __init__(self, settings: SettingsInForce, delivery: Delivery, *, system: bool) -> None:
        """`system`: hutchd runs in system mode, in which the default minimum is the level `account`."""
        self._settings = settings
        self._delivery = delivery
        self._system = system

    @property
    def limits(self) -> LimitSettings:
        """The current limits."""
        return self._settings.limits

    def least(self, asked: m.IsolationLevel | None) -> m.IsolationLevel:
        """Return the lowest level that a session may have, by the settings and the level that its opener required."""
        by_default: m.IsolationLevel = "account" if self._system else "reduced"
        return highest(self._settings.current.isolation.require or by_default, asked)

    def accepts(self, isolation: m.Isolation) -> bool:
        """Return whether the current settings still allow a session with this isolation to go on.

        An earlier version recorded neither what is open nor the kind of a sandbox: then only the level counts.
        """
        settings = self._settings.current.sandbox
        if isolation.network is not None and settings.mode == "require" and isolation.sandbox not in kinds_of(settings):
            return False
        return not is_less(isolation.level, self.least(isolation.asked))

    async def plan(
        self,
        environment: Environment,
        agent: str,
        cwd: str,
        account: Account,
        asked: m.IsolationLevel | None,
        *,
        grouped: bool = True,
    ) -> IsolationPlan:
        """Plan a session of `agent` in `cwd` as this account; `asked` is the level that its opener required.

        `grouped=False`: its executor has no cgroup, even if the environment offers cgroups. `isolation_unavailable` if
        the settings or the opener require more than is available.
        """
        settings = self._settings.current
        probe = await environment.probe_sandbox(account, settings.sandbox)
        offer, level = environment.isolation_offered(), self.least(asked)
        offer = replace(offer, cgroup=offer.cgroup and grouped)
        look = partial(self._plan, offer, probe, agent, cwd, account.home, level)
        with anyio.move_on_after(_HOME_TIMEOUT) as scope:
            plan = await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=_HOME_THREADS)
        if scope.cancelled_caught:
            raise _unavailable(f"{account.home} does not answer: {account.name} cannot work there now.")
        require_level(plan.isolation)
        if plan.keys == "exposed" and settings.keys.refuse_exposed:
            raise _unavailable(f"The settings refuse it: [keys] refuse_exposed. {plan.isolation.keys_why}")
        if plan.sandbox is None and settings.sandbox.mode == "require":
            raise _unavailable(f'The settings refuse it: [sandbox] mode = "require". {plan.isolation.why}')
        if plan.is_lost:
            raise _unavailable(
                f"{plan.isolation.why} It held before and bubblewrap has not changed, so no session runs without a"
                ' sandbox in its place; [sandbox] mode = "off" allows that.'
            )
        if plan.sandbox is None and (network := settings.sandbox.network) != "full":
            raise _unavailable(
                f'The settings refuse it: [sandbox] network = "{network}" needs a sandbox. {plan.isolation.why}'
            )
        return plan

    def usual(self, environment: Environment, probe: SandboxProbe) -> IsolationPlan:
        """Plan a typical session: it needs a key and works in a folder of its account's home."""

        offer, level = environment.isolation_offered(), self.least(None)
        return self._plan(offer, probe, DEFAULT_AGENT, "/home/account/folder", "/home/account", level)

    def _plan(
        self, offer: IsolationOffer, probe: SandboxProbe, agent: str, cwd: str, home: str, asked: m.IsolationLevel
    ) -> IsolationPlan:
        settings = self._settings.current.sandbox
        provider = provider_of(agent)
        choice = probe.choose(cwd, home, settings)
        wanted = asked == "strict" or settings.mode == "require" or settings.network != "full"
        if provider is None and not wanted:
            choice = SandboxChoice(
                None, "A scripted agent gets a sandbox only if the settings or the session require one."
            )
        isolation = level_of(offer, choice, asked)
        isolation = msgspec.structs.replace(isolation, limits=self._describe_limits(offer.cgroup))
        if provider is None:
            return IsolationPlan(choice.spec, "none", isolation, probe, choice.is_lost)
        delivery, how = self._delivery(provider)
        keys: m.KeysKept = "exposed"
        if delivery == "direct":
            why = f"The key itself is handed to the agent. {how}"
        elif offer.separate_account or choice.spec is not None:
            keys, why = "brokered", f"{how} The agent can reach nothing that would reveal it."
        else:
            why = f"The agent could read Hutch's files, and so the key. {choice.why}"
        isolation = msgspec.structs.replace(isolation, keys_why=why)
        return IsolationPlan(choice.spec, keys, isolation, probe, choice.is_lost)

    def _describe_limits(self, cgroup: bool) -> str:
        """Return a phrase that names the limits of a session's processes."""
        limits = self.limits
        each = "" if cgroup else " (of each process: there is no cgroup)"
        parts = [
            f"{limits.memory >> 20:,} MiB of memory{each}" if limits.memory else "",
            f"{limits.pids:,} processes and threads" if limits.pids and cgroup else "",
            f"cpu weight {limits.cpu_weight}" if cgroup else "",
            f"{limits.open_files:,} open files of each process",
        ]
        return ", ".join(filter(None, parts))


def _unavailable(why: str) -> HutchError:
    return HutchError(Reason.ISOLATION_UNAVAILABLE, why)
