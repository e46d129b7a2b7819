"""A hutchd without sockets: the real store, approvals, pool and services with fake executors; it can be restarted."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.events.fanout import Fanout, event_json
from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.keys.master import load_master_keys
from hutch_daemon.keys.vault import Vault
from hutch_daemon.pool import tokens
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.services.access import Caller
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.host import DaemonInfo, StopRequest
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.services.notices import Notices
from hutch_daemon.services.services import Services
from hutch_daemon.settings import ExecutorSettings, PermissionSettings, Settings, SettingsInForce, TurnSettings
from hutch_daemon.signals import Signal
from hutch_daemon.store import events
from hutch_daemon.store.rows import SessionRow
from hutch_daemon.store.store import Store
from hutch_daemon.wiring.assembly import Opened, running_services
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from hutch_shared.times import awake_ms
from tests.fakes.executors import FakeExecutor, FakeHost
from tests.fakes.stores import new_database

WAIT = 30.0
"""Seconds after which a test gives up; nothing is measured with it."""
BOOT = "boot-1"


class FakeClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _DirectKeys:
    def __init__(self, vault: Vault, networks: list[m.Network | None]) -> None:
        self._vault = vault
        self._networks = networks

    def delivery(self, provider: str) -> tuple[m.Delivery, str]:
        return "direct", "There is no broker."

    async def grant(self, session: SessionRow, provider: str, holder: LeaseHolder | None = None) -> m.KeyGrant:
        self._networks.append(holder.network if holder is not None else None)
        return m.KeyGrant("direct", f"key of {session.owner} for {provider}")

    async def explain(self, owner: int, provider: str, name: str | None = None) -> m.KeyExplained:
        await self._vault.choose(owner, provider, name)
        keys = await self._vault.list_(owner)
        return m.KeyExplained(keys.keys[0], "it is the only one", "direct", "there is no broker")


class NoLeases:
    """A broker link without a broker: it records which leases were ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.in_turn: list[str] = []
        """The sessions whose processes may use a model."""
        self.turns: list[tuple[str, str]] = []
        """What the services said about turns, in order: `begin` or `end`, and the session."""

    async def begin_turn(self, session: str) -> None:
        self.turns.append(("begin", session))
        self.in_turn.append(session)

    async def end_turn(self, session: str) -> None:
        if session in self.in_turn:
            self.turns.append(("end", session))
            self.in_turn.remove(session)

    async def state(self) -> m.BrokerState:
        return m.BrokerState("idle")

    def request_start(self) -> None:
        return

    async def refresh_credential(self, credential: str) -> None:
        return

    async def revoke_credential(self, credential: str) -> int:
        self.ended.append(credential)
        return 0

    async def revoke_executor(self, executor: str) -> int:
        self.ended.append(executor)
        return 0

    async def price_trouble(self, provider: str, model: str) -> str:
        return f"{model} of {provider} has no price." if model == "no-price" else ""


def settings(**changes: Any) -> Settings:
    """Return settings with no spares and short deadlines."""
    fields: dict[str, Any] = {
        "executors": ExecutorSettings(
            spares=0, adopt_timeout=WAIT, hello_timeout=WAIT, start_attempts=3, lost_timeout=WAIT
        ),
        "turns": TurnSettings(interrupt_grace=WAIT),
        "permissions": PermissionSettings(return_grace=0.001),
    }
    return Settings(**(fields | changes))


async def until(what: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Wait until a condition holds, checking again whenever other tasks have run; less often the longer it takes."""
    pause = 0.002
    with anyio.fail_after(WAIT):
        while True:
            found = what()
            if found is True or (not isinstance(found, bool) and await found):
                return
            await anyio.sleep(pause)
            pause = min(1.5 * pause, 0.02)


class Stage:
    """Successive hutchds on one state directory and one host of fake executors."""

    def __init__(self, folder: Path, tasks: TaskGroup) -> None:
        self.folder = folder
        self.files = "1"
        """The version of the executors' files."""
        self.groups: dict[int, tuple[int, ...]] = {}
        """The supplementary groups of accounts."""
        self.host = FakeHost(tasks, BOOT)
        self.in_force = SettingsInForce(settings())
        self.clock: Callable[[], float] = time.monotonic
        self.me = Caller(os.getuid(), os.getgid(), os.getpid(), "test")
        self.known = KnownSecrets()
        self.leases = NoLeases()
        self.networks: list[m.Network | None] = []
        """The networks of the executors that asked for a key, in order."""
        self.mode: Literal["user", "system"] = "user"
        self.admins = {0}
        self.gone_accounts: set[int] = set()
        self.services: Services
        self.key_troubles: KeyTroubles
        self.notices = Notices()
        self.store: Store
        self.pool: Pool
        self.fanout: Fanout

    @property
    def settings(self) -> Settings:
        """The settings in force; setting them replaces those of the hutchd that runs."""
        return self.in_force.current

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self.in_force.replace(settings)

    @asynccontextmanager
    async def hutchd(self) -> AsyncIterator[Self]:
        """Run a hutchd; it ends as in a crash: executors live on, connections break."""
        self.in_force = SettingsInForce(self.settings, system=self.mode == "system")
        async with Store.open(new_database(self.folder / "hutch.db")) as self.store:
            self.fanout = Fanout(self.store)
            vault = await Vault.load(
                self.store, load_master_keys(self.folder / "master.key", {}), self.folder / "ledger"
            )
            environments = Environments(self.host)
            self.executor_changed: Signal[[Executor]] = Signal()
            self.pool = Pool(
                self.store,
                environments,
                self.in_force,
                lambda: tokens.issue(awake_ms()),
                self.account_of,
                self.account_named,
                socket=str(self.folder / "executor.sock"),
                server_uid=os.getuid(),
                boot_id=BOOT,
                output_dir=self.folder / "output",
                on_notice=self.notices.add,
                files=lambda: self.files,
                clock=time.monotonic,
                on_change=self.executor_changed.emit,
            )
            self.key_troubles = KeyTroubles(self.store)
            opened = Opened(
                store=self.store,
                fanout=self.fanout,
                pool=self.pool,
                executor_changed=self.executor_changed,
                vault=vault,
                grants=_DirectKeys(vault, self.networks),
                leases=self.leases,
                key_troubles=self.key_troubles,
                notices=self.notices,
                environments=environments,
                accounts=Accounts(
                    self.account_of,
                    self.account_named,
                    self.in_force,
                    lambda uid: uid in self.admins,
                    system=self.mode == "system",
                ),
                known=self.known,
                settings=self.in_force,
                info=DaemonInfo(mode=self.mode),
                spool_dir=self.folder / "spool",
                host_policy=self.folder / "policy.toml",
                boot_id=BOOT,
                own_spares=False,
                clock=self.clock,
            )
            async with running_services(opened, StopRequest()) as self.services:
                self.host.services = self.services
                yield self
            for executor in self.host.started:
                if executor.connection is not None:
                    executor.connection.open = False
                    executor.connection = None

    def account_of(self, uid: int) -> Account:
        if uid in self.gone_accounts:
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"There is no account with the uid {uid}.")
        return Account(uid, uid, f"user{uid}", str(self.folder), groups=self.groups.get(uid, ()))

    def account_named(self, name: str) -> Account:
        known = {"service": Account(4000, 4000, "service", str(self.folder))}
        try:
            return known.get(name) or self.account_of(int(name.removeprefix("user")))
        except ValueError:
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"There is no account {name}.") from None

    # ------------------------------------------------------------ actions of a client

    async def open(self, **changes: Any) -> m.Session:
        """Open a session of the script agent."""
        fields: dict[str, Any] = {"agent": "script", "cwd": "/proj"}
        return await self.services.sessions.open_session(self.me, m.OpenSession(**(fields | changes)))

    async def submit(self, session: m.Session, prompt: str = "go", key: str | None = None) -> m.Turn:
        """Submit a prompt."""
        return await self.services.turns.submit_prompt(self.me, m.SubmitPrompt(session.id, prompt, key))

    async def turn(self, turn: m.Turn) -> m.Turn:
        """Return a turn."""
        return await self.services.turns.get_turn(self.me, m.TurnRef(turn.id))

    async def ended(self, turn: m.Turn) -> m.Turn:
        """Wait for a turn's end."""

        async def over() -> bool:
            return (await self.turn(turn)).ended_at is not None

        await until(over)
        return await self.turn(turn)

    async def running(self, turn: m.Turn) -> FakeExecutor:
        """Wait until a turn runs; return its executor."""

        async def runs() -> bool:
            return (await self.turn(turn)).state in ("running", "awaiting_permission")

        await until(runs)
        return self.executor

    @property
    def executor(self) -> FakeExecutor:
        """Return the newest executor."""
        return self.host.started[-1]

    async def events(self, session: m.Session) -> list[Event]:
        """Return all events of a session."""
        page = await self.store.read(partial(events.read, session=session.id, after=0, limit=1000))
        return [msgspec.json.decode(event_json(event), type=Event) for event in page.events]

    async def kinds(self, session: m.Session) -> list[str]:
        """Return the kinds of all events of a session, in order."""
        return [event.kind for event in await self.events(session)]

    async def pending(self) -> m.Permission:
        """Wait for a permission request; return the first pending one."""

        async def asked() -> bool:
            return bool((await self.services.approvals.list_permissions(self.me, m.ListPermissions())).permissions)

        await until(asked)
        return (await self.services.approvals.list_permissions(self.me, m.ListPermissions())).permissions[0]

    async def answer(self, permission: m.Permission, decision: m.Decision, **changes: Any) -> m.Permission:
        """Decide a permission request."""
        return await self.services.approvals.answer_permission(
            self.me, m.AnswerPermission(permission.id, decision, **changes)
        )


@asynccontextmanager
async def new_stage(folder: Path) -> AsyncIterator[Stage]:
    """Yield a stage; its executors end with it."""
    async with anyio.create_task_group() as tasks:
        yield Stage(folder, tasks)
        tasks.cancel_scope.cancel()
