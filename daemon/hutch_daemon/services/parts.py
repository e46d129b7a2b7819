"""What the conductor's pieces share: the parts of hutchd, introduced to each other here and nowhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from hutch_daemon.environments.accounts import account_named
from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.events.fanout import Fanout
from hutch_daemon.events.journal import Journal
from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.keys.vault import Vault
from hutch_daemon.pool.pool import Pool
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.services.account_map import may_run_as
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.settings import LimitSettings, Settings
from hutch_daemon.store.rows import SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["About", "KeyGrants", "Leases", "Parts", "awake_ms"]

"""Whose models an agent uses; an agent that is not here needs no key."""


def awake_ms() -> int:
    """Return milliseconds of this boot in which the machine was awake: the clock that lifetimes count."""
    return time.monotonic_ns() // 1_000_000


class KeyGrants(Protocol):
    """Decides what an executor may have of a key, for it and the processes that it starts."""

    def delivery(self, provider: str) -> tuple[m.Delivery, str]: ...

    async def grant(self, session: SessionRow, provider: str, holder: LeaseHolder | None = None) -> m.KeyGrant: ...

    async def explain(self, owner: int, provider: str, name: str | None = None) -> m.KeyExplained: ...


class Leases(Protocol):
    """Ends what agents may do with keys: the broker."""

    def request_start(self) -> None: ...
    async def refresh_credential(self, credential: str) -> None: ...
    async def revoke_credential(self, credential: str) -> int: ...
    async def revoke_executor(self, executor: str) -> int: ...
    async def state(self) -> m.BrokerState: ...


@dataclass(frozen=True, slots=True)
class About:
    """What `get_status` says of hutchd itself."""

    mode: Literal["user", "system"] = "user"
    started_at: int = 0
    paths: Mapping[str, str] = field(default_factory=dict)
    clients: Callable[[], int] = lambda: 0
    notices: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True, slots=True)
class Parts:
    """Made once by the composition root."""

    store: Store
    journal: Journal
    fanout: Fanout
    pool: Pool
    vault: Vault
    grants: KeyGrants
    leases: Leases
    key_troubles: KeyTroubles
    settings: Callable[[], Settings]
    account_of: Callable[[int], Account]
    spool_dir: Path
    """A directory per executor is made below it."""
    host_policy: Path
    boot_id: str
    environments: Environments
    account_named: Callable[[str], Account] = account_named
    is_admin: Callable[[int], bool] = lambda uid: uid == 0
    """Tells of a person whether the settings call him an administrator now."""
    own_spares: bool = True
    """Keep spares of hutchd's own account from the start (user mode)."""
    known: KnownSecrets = field(default_factory=KnownSecrets)
    """What is masked in what agents say."""
    about: About = About()
    clock: Callable[[], float] = time.monotonic

    def limits(self) -> LimitSettings:
        """Return the limits in force."""
        return self.settings().bounds(system=self.about.mode == "system")

    def bounds(self, cgroup: bool) -> str:
        """Say what bounds a session's processes."""
        limits = self.limits()
        each = "" if cgroup else " (of each process: there is no cgroup)"
        said = [
            f"{limits.memory >> 20:,} MiB of memory{each}" if limits.memory else "",
            f"{limits.pids:,} processes and threads" if limits.pids and cgroup else "",
            f"cpu weight {limits.cpu_weight}" if cgroup else "",
            f"{limits.open_files:,} open files of each process",
        ]
        return ", ".join(filter(None, said))

    def account(self, session: SessionRow) -> Account:
        """Return the account that a session runs as; `isolation_unavailable` when it is no more."""
        own = self.account_of(session.owner)
        return own if own.name == session.account else self.account_named(session.account)

    def demand_account(self, session: SessionRow) -> Account:
        """Return it if its owner may run agents as it by the settings of now, else `not_allowed`."""
        account = self.account(session)
        if self.about.mode == "system" and account.uid != os.geteuid():
            person, admin = self.account_of(session.owner).name, self.is_admin(session.owner)
            if not may_run_as(person, account.name, self.settings().accounts, admin=admin):
                raise HutchError(
                    Reason.NOT_ALLOWED,
                    f"{person} may not run agents as {account.name} any more ([accounts] map and run_as of the"
                    " settings); the session can be read and closed.",
                )
        return account
