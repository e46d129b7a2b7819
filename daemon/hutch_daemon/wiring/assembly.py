"""Builds the services from the components that hutchd opened, and runs their tasks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from hutch_daemon.environments.registry import Environments
from hutch_daemon.events.fanout import Fanout
from hutch_daemon.keys.vault import Vault
from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.services import adoption
from hutch_daemon.services.access import Access
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.agent_dirs import LeftDirs
from hutch_daemon.services.approvals import ApprovalService, connected_requester
from hutch_daemon.services.executor_changes import ExecutorChanges
from hutch_daemon.services.executors import ExecutorService, GrantsKeys
from hutch_daemon.services.forks import ForkService
from hutch_daemon.services.history import HistoryService
from hutch_daemon.services.host import DaemonInfo, HostService, StopRequest
from hutch_daemon.services.isolation import IsolationPlanner
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.services.keys import ExplainsKeys, KeyService, LeaseControl
from hutch_daemon.services.masking import Masking
from hutch_daemon.services.modes import ModeService, enter_plan, leave_plan
from hutch_daemon.services.notices import Notices
from hutch_daemon.services.orphan_spools import OrphanSpools
from hutch_daemon.services.policy import PolicyService
from hutch_daemon.services.policy_layers import PolicyLayers
from hutch_daemon.services.presence import Presence
from hutch_daemon.services.reports import ReportService
from hutch_daemon.services.services import Services
from hutch_daemon.services.session_executors import SessionExecutors
from hutch_daemon.services.session_loop import SessionLoop, TurnLeases
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.services.sessions import SessionService
from hutch_daemon.services.turn_lifecycle import TurnLifecycle
from hutch_daemon.services.turns import TurnService
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.signals import Signal
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import Reason
from hutch_shared.events import TurnEnded

__all__ = ["KeyGranting", "Leases", "Opened", "running_services"]


class KeyGranting(GrantsKeys, ExplainsKeys, Protocol):
    """Grants keys, and explains the grants."""

    def delivery(self, provider: str) -> tuple[m.Delivery, str]: ...


class Leases(LeaseControl, TurnLeases, Protocol):
    """The broker's methods that the services use."""

    async def revoke_executor(self, executor: str) -> int: ...
    async def price_trouble(self, provider: str, model: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """The components that hutchd opened, from which the services are built. No service gets it as a whole."""

    store: Store
    fanout: Fanout
    pool: Pool
    executor_changed: Signal[[Executor]]
    """Emitted by the pool when an executor's state or connection has changed."""
    vault: Vault
    grants: KeyGranting
    leases: Leases
    key_troubles: KeyTroubles
    notices: Notices
    environments: Environments
    accounts: Accounts
    known: KnownSecrets
    settings: SettingsInForce
    info: DaemonInfo
    spool_dir: Path
    host_policy: Path
    boot_id: str
    own_spares: bool = True
    """True to keep spares of hutchd's own account from the start."""
    clients: Callable[[], int] = lambda: 0
    settings_notices: Callable[[], tuple[str, ...]] = tuple
    clock: Callable[[], float] = time.monotonic


@asynccontextmanager
async def running_services(opened: Opened, stop_request: StopRequest) -> AsyncIterator[Services]:
    """Build the services, adopt the executors of an earlier hutchd, and run while the block runs.

    When the block starts, executors may connect; adopted ones must do so within `executors.adopt_timeout`. Leaving the
    block ends no executor.
    """
    store, pool, settings = opened.store, opened.pool, opened.settings
    accounts, environments, vault, known = opened.accounts, opened.environments, opened.vault, opened.known
    system = opened.info.mode == "system"

    access = Access(store)
    layers = PolicyLayers(store, opened.host_policy, accounts)
    isolation = IsolationPlanner(settings, opened.grants.delivery, system=system)
    presence = Presence(opened.fanout, settings, opened.clock)
    tasks = SessionTasks(presence, opened.notices)
    approvals = Approvals(
        store,
        settings,
        layers,
        somebody_there=presence.is_present,
        stop_turn=tasks.request_stop,
        plan_approved=leave_plan,
        plan_entered=enter_plan,
        requester_of=partial(connected_requester, pool.roster, settings, store),
        clock=opened.clock,
    )
    layers.project_changed.subscribe(approvals.session_changed)
    lifecycle = TurnLifecycle(approvals)
    masking = Masking(known)

    def turn_reported(executor: str, ended: TurnEnded) -> None:
        if (found := pool.roster.by_id.get(executor)) is not None:
            found.has_recap = found.has_recap and ended.conversation_kept
            found.sandbox_failed = ended.reason == Reason.ISOLATION_UNAVAILABLE.word

    reports = ReportService(store, lifecycle, tasks.wake, masking, tasks.before_end, turn_reported)
    spools = OrphanSpools(store, pool, reports)
    left_dirs = LeftDirs(store, pool)
    changes = ExecutorChanges(
        store,
        opened.executor_changed,
        pool.roster,
        tasks,
        spools,
        left_dirs,
        approvals,
        opened.leases.revoke_executor,
        opened.spool_dir,
    )

    def session_deleted(session: str) -> None:
        opened.fanout.remove(session)
        left_dirs.look()

    executors = SessionExecutors(store, pool, accounts, isolation, vault, known, settings, opened.spool_dir)

    def session_closed(session: str) -> None:
        layers.forget(session)
        left_dirs.look()

    def make_loop(session: str, owner: int) -> SessionLoop:
        return SessionLoop(
            session,
            owner,
            store,
            pool,
            executors,
            lifecycle,
            settings,
            on_closed=session_closed,
            import_spool=spools.import_spool,
            leases=opened.leases,
            clock=opened.clock,
        )

    keys = KeyService(access, vault, opened.grants, opened.leases, opened.key_troubles, settings)
    sessions = SessionService(
        store,
        access,
        accounts,
        environments,
        isolation,
        vault,
        layers,
        tasks,
        pool.roster,
        settings,
        session_deleted,
        opened.leases.price_trouble,
    )
    services = Services(
        access=access,
        sessions=sessions,
        forks=ForkService(access, accounts, vault, sessions),
        modes=ModeService(store, access, layers, pool.roster, sessions),
        turns=TurnService(store, access, tasks, lifecycle, known, settings),
        approvals=ApprovalService(store, access, approvals, pool, masking, settings),
        history=HistoryService(store, access),
        host=HostService(
            store,
            access,
            accounts,
            environments,
            isolation,
            keys,
            tasks,
            pool,
            opened.notices,
            stop_request,
            opened.info,
            settings,
            clients=opened.clients,
            settings_notices=opened.settings_notices,
        ),
        policy=PolicyService(store, access, layers, pool, settings),
        keys=keys,
        executors=ExecutorService(store, pool, opened.grants, opened.boot_id),
        reports=reports,
    )

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.running())
        await stack.enter_async_context(approvals.running())
        await stack.enter_async_context(changes.running())
        await stack.enter_async_context(services.executors.running())
        await stack.enter_async_context(tasks.running(make_loop))
        background = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(background.cancel_scope.cancel)
        background.start_soon(presence.run, approvals.nobody_left)
        expected = await adoption.take_over(store, pool, tasks)
        background.start_soon(adoption.end_missing, pool, expected, settings.current.executors.adopt_timeout)
        background.start_soon(spools.run)
        background.start_soon(left_dirs.run)
        if opened.own_spares:
            pool.warm(adoption.spares_of(accounts.by_uid, environments, settings.current.executors.spare_agents))
        yield services
