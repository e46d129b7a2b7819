"""The composition root: makes the parts, introduces them, and ends them in order.

The record is opened first, so that a second hutchd on the same state ends before it touches a socket; the client socket
opens last, when everything behind it works. At the end it goes the other way round.
"""

from __future__ import annotations

import grp
import os
import pwd
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import structlog

from hutch_daemon.api.clients import ClientSide
from hutch_daemon.api.executors import ExecutorSide
from hutch_daemon.api.gate import Phase
from hutch_daemon.api.server import serve
from hutch_daemon.environments.accounts import account_of, groups_of
from hutch_daemon.environments.launcher_client import LauncherClient
from hutch_daemon.environments.local import Places
from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.environments.same_user import SameUser
from hutch_daemon.environments.unix_user import UnixUser
from hutch_daemon.events.fanout import Fanout, Room
from hutch_daemon.events.journal import Journal
from hutch_daemon.keys.broker import Broker
from hutch_daemon.keys.broker_boot import BrokerPaths
from hutch_daemon.keys.credential import Credential
from hutch_daemon.keys.grants import Grants
from hutch_daemon.keys.master import load_master_keys
from hutch_daemon.keys.oauth import FreshKeys
from hutch_daemon.keys.vault import Vault
from hutch_daemon.pool import tokens
from hutch_daemon.pool.pool import Pool
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.service import Service
from hutch_daemon.services.conductor import Conductor
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.services.parts import About, Parts, awake_ms
from hutch_daemon.settings import Settings, SettingsError, load
from hutch_daemon.store import executors as executors_of
from hutch_daemon.store import keys
from hutch_daemon.store.store import Store, StoreLimits
from hutch_shared import __file__ as shared_file
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.logs import mask_also, set_up_logs
from hutch_shared.paths import Paths
from hutch_shared.times import now_ms
from hutch_shared.unix import Credentials, Listener, boot_id, listen, take_over

__all__ = ["master_file", "run"]

_log: Final = structlog.get_logger("hutchd")
_DAY: Final = 24 * 3600
_PRUNE_EVERY: Final = 3600.0
_TOUCH_EVERY: Final = 20.0
_FAREWELL: Final = 5.0
"""Seconds for the last frames to reach the clients."""
_ENDING: Final = 60.0
"""Seconds to end executors and close the record, as a service manager is told."""
_WAYS: Final = {"drain": "running turns end first", "leave": "turns are left running", "stop": "turns are stopped"}


@dataclass(slots=True)
class _Current:
    """The settings in force, and what was wrong with the last that were read."""

    paths: Paths
    settings: Settings
    service: Service
    trouble: str = ""
    admins: frozenset[int] = field(default_factory=frozenset)
    changed: anyio.Event = field(default_factory=anyio.Event)
    """Set when other settings came into force; those bring a new event."""

    def __post_init__(self) -> None:
        self.admins = _uids(self.settings)

    def reload(self) -> None:
        """Read the file again; one that cannot be used changes nothing, and is said."""
        self.service.reloading()
        self._reload()
        self.service.say("READY=1", self.service.status(self.trouble or f"Serves at {self.paths.client_socket}"))

    def _reload(self) -> None:
        try:
            self.settings = load(self.paths.config)
        except SettingsError as error:
            self.trouble = f"The settings were not taken over: {error}"
            _log.error("settings refused", error=str(error))
            return
        self.trouble = ""
        self.admins = _uids(self.settings)
        set_up_logs(self.settings.logs.level)
        self.changed.set()
        self.changed = anyio.Event()
        _log.info("settings read", path=str(self.paths.config))

    def is_admin(self, credentials: Credentials) -> bool:
        """Tell whether somebody sees and steers everything."""
        if credentials.uid == 0 or credentials.uid in self.admins:
            return True
        groups = self.settings.admins.groups
        return bool(groups) and not groups_of(credentials.uid).isdisjoint(groups)

    def notices(self) -> tuple[str, ...]:
        """Return what is wrong with the settings."""
        return (self.trouble,) if self.trouble else ()


async def run(paths: Paths, settings: Settings, service: Service) -> None:
    """Serve until a signal or a client ends it. HutchError, MasterKeyError or OSError when it cannot begin."""
    current = _Current(paths, settings, service)
    service.say(service.status(f"Opens the record in {paths.state}"))
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        )  # until the end
        limits = StoreLimits(wal=settings.store.wal_bytes, wal_held=8 * settings.store.wal_bytes)
        store = await stack.enter_async_context(Store.open(paths.state / "hutch.db", limits=limits))
        passed = _passed(service, paths, stack)
        master = load_master_keys(master_file(paths, settings), keyring=settings.keys.keyring)
        known = KnownSecrets()
        vault = await Vault.load(store, master, paths.state / "vault.ledger", opened=partial(_learn, known))
        mask_also(known.mask_text)
        journal = Journal(store)
        key_troubles = KeyTroubles(store, journal)
        broker = Broker(
            store,
            lambda: current.settings,
            BrokerPaths.under(paths.runtime, paths.state),
            partial(_holds, store),
            fresh=FreshKeys(vault, lambda: current.settings),
            report=key_troubles.report,
            everyone=paths.system,
        )
        fanout = Fanout(store, Room(bytes=settings.sockets.follower_bytes))
        places = _own_places(paths, settings), _own_programs()
        environments = _environments(current, places, stack)
        if why := await environments.probe():
            _log.warning("sessions cannot have what this host should give them", why=why)
        pool = Pool(
            store,
            environments,
            lambda: current.settings.executors,
            lambda: tokens.issue(awake_ms()),
            socket=str(paths.executor_socket),
            server_uid=os.geteuid(),
            boot_id=boot_id(),
            output_dir=paths.state / "executors",
            account_of=_account_of,
            limits=lambda: current.settings.bounds(system=paths.system),
            on_change=lambda executor: conductor.executor_changed(executor),
            on_notice=lambda word, message: conductor.noticed(word, message),
        )
        clients: list[ClientSide] = []
        parts = Parts(
            store=store,
            journal=journal,
            fanout=fanout,
            pool=pool,
            vault=vault,
            grants=Grants(store, vault, lambda: current.settings, broker),
            leases=broker,
            key_troubles=key_troubles,
            settings=lambda: current.settings,
            account_of=_account_of,
            spool_dir=paths.state / "spool",
            host_policy=_host_policy(paths, settings),
            boot_id=boot_id(),
            is_admin=lambda uid: current.is_admin(Credentials(uid, 0, 0)),
            environments=environments,
            own_spares=not paths.system,
            known=known,
            about=About(
                mode="system" if paths.system else "user",
                started_at=now_ms(),
                paths={"settings": str(paths.config), "state": str(paths.state), "sockets": str(paths.runtime)},
                clients=lambda: sum(len(side.connections) for side in clients),
                notices=current.notices,
            ),
        )
        conductor = Conductor(parts)
        world = _mode(paths)
        executor_listener = passed.get("executor") or stack.enter_context(listen(paths.executor_socket, world))
        await stack.enter_async_context(broker.running())
        if await store.read(keys.list_):
            broker.request_start()
        await stack.enter_async_context(conductor.running())
        tasks = await stack.enter_async_context(anyio.create_task_group())
        executors = ExecutorSide(conductor, lambda: current.settings)
        tasks.start_soon(serve, executor_listener, executors.run, lambda: current.settings.sockets, attrgetter("hello"))
        side = ClientSide(
            conductor,
            lambda: current.settings,
            is_admin=current.is_admin,
            insider_of=conductor.insider_of,
            phase=lambda: Phase.DRAINING if conductor.draining else Phase.SERVING,
            daemon_uid=os.geteuid(),
        )
        clients.append(side)
        client_listener = passed.get("client") or stack.enter_context(listen(paths.client_socket, world))
        tasks.start_soon(serve, client_listener, side.run, lambda: current.settings.sockets, attrgetter("first_frame"))
        tasks.start_soon(_retain, parts, current)
        tasks.start_soon(_stay_in_touch, environments)
        tasks.start_soon(service.beat, lambda: store.writing)
        await anyio.lowlevel.checkpoint()  # now all of them run
        service.say("READY=1", service.status(f"Serves at {paths.client_socket}"))
        _log.info("hutchd serves", version=__version__, socket=str(paths.client_socket), epoch=store.epoch)
        await _until_stopped(conductor, current, signals)
        fanout.close()
        with anyio.move_on_after(_FAREWELL):
            await side.close(HutchError(Reason.SHUTTING_DOWN))
        tasks.cancel_scope.cancel()
    _log.info("hutchd has stopped")


def _environments(current: _Current, places: Places, stack: AsyncExitStack) -> Environments:
    """Return the environments of this hutchd, the preferred one first."""
    same_user = SameUser(output=current.settings.executors.output, places=places)
    if not current.paths.system:
        return Environments(same_user)
    return Environments(_unix_user(current, places, stack), same_user)


def _unix_user(current: _Current, places: Places, stack: AsyncExitStack) -> UnixUser:
    """Return the environment for other accounts, with the way to the launcher that the settings name."""
    given = current.settings.isolation
    command = given.launcher_command or os.path.join(sys.prefix, "bin", "hutch-launcher")
    way = ("sudo", "-n", "--", command) if given.launcher == "sudo" else Path(given.launcher_socket)
    launcher = LauncherClient(way)
    stack.callback(launcher.close)
    return UnixUser(
        launcher,
        output=current.settings.executors.output,
        places=places,
        dedicated=lambda name: name in current.settings.accounts.dedicated,
    )


def _passed(service: Service, paths: Paths, stack: AsyncExitStack) -> dict[str, Listener]:
    """Take over what the service manager passed: who dials there waits until somebody is served."""
    places = {"client": paths.client_socket, "executor": paths.executor_socket}
    mode = _mode(paths)
    return {name: stack.enter_context(take_over(places[name], fd, mode)) for name, fd in service.sockets.items()}


def _mode(paths: Paths) -> int:
    """Return who may dial: in system mode everybody, and is known by uid, token or lease."""
    return 0o666 if paths.system else 0o600


async def _holds(store: Store, executor: str, session: str) -> bool:
    """Tell whether an executor serves a session, by its lease row: leases of the broker hold as long."""
    row = await store.read(lambda conn: executors_of.leased_to(conn, session))
    return row is not None and row.id == executor


async def _until_stopped(conductor: Conductor, current: _Current, signals: object) -> None:
    """Wait for the wish to stop and carry it out. A second signal while turns are drained leaves them running."""
    how: m.StopHow = "drain"
    timeout = current.settings.executors.drain_timeout
    async with anyio.create_task_group() as waiting:

        async def hear_signals() -> None:
            async for number in signals:  # type: ignore[attr-defined]
                if number == signal.SIGHUP:
                    current.reload()
                else:
                    _log.info("a signal ends hutchd", signal=signal.Signals(number).name)
                    waiting.cancel_scope.cancel()
                    return

        async def hear_clients() -> None:
            await conductor.stop_wished.wait()
            waiting.cancel_scope.cancel()

        waiting.start_soon(hear_signals)
        waiting.start_soon(hear_clients)
    if conductor.stop_wish is not None:
        how, timeout = conductor.stop_wish.how, conductor.stop_wish.timeout
    longest = f"EXTEND_TIMEOUT_USEC={round((min(timeout, _DAY) + _ENDING) * 1_000_000)}"
    current.service.say("STOPPING=1", longest, current.service.status("Stops:", _WAYS[how]))

    async with anyio.create_task_group() as stopping:

        async def hear_impatience() -> None:
            async for number in signals:  # type: ignore[attr-defined]
                if number != signal.SIGHUP:
                    _log.info("a second signal: live turns are left running")
                    stopping.cancel_scope.cancel()
                    return

        stopping.start_soon(hear_impatience)
        try:
            await conductor.stop(how, timeout)
        except HutchError as error:
            _log.error("the record cannot be read: executors are left running", error=error.message)
        stopping.cancel_scope.cancel()


async def _stay_in_touch(environments: Environments) -> None:
    """Probe now and then: a launcher that hears nothing from hutchd ends all executors after a while."""
    before = ""
    while True:
        await anyio.sleep(_TOUCH_EVERY)
        why = await environments.probe()
        if why != before:
            _log.warning("what this host gives sessions", why=why or "it is back")
            before = why


async def _retain(parts: Parts, current: _Current) -> None:
    """Remove what is older, or more, than the settings keep: at start, with new settings, and every hour."""
    while True:
        kept = parts.settings().store
        if kept.keep_days is not None or kept.keep_bytes is not None:
            before = None if kept.keep_days is None else now_ms() - int(kept.keep_days * _DAY * 1000)
            try:
                removed = await parts.journal.prune(before=before, max_bytes=kept.keep_bytes)
            except HutchError as error:
                _log.warning("old events are not removed", error=error.message)
            else:
                if removed:
                    _log.info("old events removed", events=removed)
        with anyio.move_on_after(_PRUNE_EVERY):
            await current.changed.wait()


def _learn(known: KnownSecrets, key: str, credential: Credential) -> None:
    """Have a credential masked from its first use on."""
    known.learn(key, credential.secret.reveal())
    if credential.refresh is not None:
        known.learn(key, credential.refresh.token.reveal())


def _own_places(paths: Paths, settings: Settings) -> tuple[str, ...]:
    """Return what no agent may see: state, sockets, settings, the master key."""
    config = paths.config.parent if paths.config.parent.name == "hutch" else paths.config
    places = (paths.state, paths.runtime, config, master_file(paths, settings))
    return tuple(dict.fromkeys(str(place) for place in places))


def _own_programs() -> tuple[str, ...]:
    """Return where the code of Hutch lies that is not an executor's: no agent may change it."""
    return tuple({str(Path(file).parents[1]) for file in (__file__, shared_file)})


def _account_of(uid: int) -> Account:
    """Return an account; hutchd's own has the home that hutchd was started with."""
    return account_of(uid, home=os.environ.get("HOME") if uid == os.geteuid() else None)


def master_file(paths: Paths, settings: Settings) -> Path:
    """Return where the master key is kept, unless it comes from a keyring or from systemd."""
    return Path(settings.keys.master) if settings.keys.master is not None else paths.state / "master.key"


def _host_policy(paths: Paths, settings: Settings) -> Path:
    if settings.permissions.host_policy is not None:
        return Path(settings.permissions.host_policy)
    return paths.config.with_name("policy.toml") if paths.system else Path("/etc/hutch/policy.toml")


def _uids(settings: Settings) -> frozenset[int]:
    """Return the uids of the admins by name; a name that is not known is nobody's."""
    found = set()
    for name in settings.admins.users:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            _log.warning("no such account", admin=name)
    for name in _unknown_groups(settings.admins.groups):
        _log.warning("no such group", admins=name)
    return frozenset(found)


def _unknown_groups(names: Sequence[str]) -> list[str]:
    known = {group.gr_name for group in grp.getgrall()} if names else set()
    return [name for name in names if name not in known]
