"""The composition root: opens hutchd's components in order, serves, and closes them in the opposite order.

The store is opened first, so that a second hutchd on the same state directory ends before it touches a socket. The
client socket is opened last, when everything behind it works.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel
import structlog

from hutch_daemon import __file__ as daemon_file
from hutch_daemon.api.clients import ClientConnection, ClientListener
from hutch_daemon.api.executors import ExecutorListener
from hutch_daemon.api.server import serve
from hutch_daemon.environments.accounts import account_named, account_of
from hutch_daemon.environments.launcher_client import LauncherClient
from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.environments.same_user import SameUser
from hutch_daemon.environments.sandbox_probe import Places
from hutch_daemon.environments.unix_user import UnixUser
from hutch_daemon.events.fanout import Fanout, QueueLimits
from hutch_daemon.keys.broker import Broker
from hutch_daemon.keys.broker_boot import BrokerPaths
from hutch_daemon.keys.credential import Credential
from hutch_daemon.keys.grants import Grants
from hutch_daemon.keys.master import load_master_keys, master_file
from hutch_daemon.keys.oauth import FreshKeys
from hutch_daemon.keys.vault import Vault
from hutch_daemon.pool import tokens
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.made_of import ExecutorFiles
from hutch_daemon.pool.pool import Pool
from hutch_daemon.redaction import KnownSecrets
from hutch_daemon.service import Service
from hutch_daemon.services.access import InsiderLookup
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.host import DaemonInfo, StopRequest
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.services.notices import Notices
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_daemon.signals import Signal
from hutch_daemon.store import executors, keys
from hutch_daemon.store.store import Store, StoreLimits
from hutch_daemon.wiring.assembly import Opened, running_services
from hutch_daemon.wiring.process_recording import ProcessRecording
from hutch_daemon.wiring.settings_file import SettingsFile
from hutch_daemon.wiring.sockets import Sockets
from hutch_daemon.wiring.stopping import until_stopped
from hutch_daemon.wiring.upkeep import keep_probing, refresh_prices, retain
from hutch_shared import __file__ as shared_file
from hutch_shared import __version__
from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import leave_mark
from hutch_shared.logs import mask_also
from hutch_shared.paths import Paths
from hutch_shared.processes import boot_id
from hutch_shared.times import awake_ms, now_ms

__all__ = ["run"]

_log: Final = structlog.get_logger("hutchd")
_FAREWELL: Final = 5.0
"""Seconds for sending the last frames to the clients."""


async def run(paths: Paths, settings: Settings, service: Service, served: Callable[[], None]) -> None:
    """Serve until a signal or a client stops hutchd; call `served` once clients can connect.

    HutchError, MasterKeyError or OSError if it cannot start.
    """
    file = SettingsFile(paths, settings, service)
    in_force = file.in_force
    service.say(service.status(f"Opens the record in {paths.state}"))
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        limits = StoreLimits(wal=settings.store.wal_bytes, wal_held=8 * settings.store.wal_bytes)
        store = await stack.enter_async_context(Store.open(paths.state / "hutch.db", limits=limits))
        sockets = stack.enter_context(Sockets(paths, service))
        fanout = Fanout(store, QueueLimits(bytes=settings.sockets.follower_bytes))
        notices = Notices()

        # keys
        known = KnownSecrets()
        mask_also(known.mask_text)
        master = load_master_keys(master_file(paths, settings), keyring=settings.keys.keyring)
        vault = await Vault.load(store, master, paths.state / "vault.ledger", opened=partial(_learn, known))
        key_troubles = KeyTroubles(store)
        broker = Broker(
            store,
            in_force,
            BrokerPaths.under(paths.runtime, paths.state),
            partial(_holds, store),
            fresh=FreshKeys(vault, in_force),
            report=key_troubles.report,
            everyone=paths.system,
        )

        # executors
        environments = _environments(in_force, paths, (_own_places(paths, settings), _own_programs()), stack)
        if why := await environments.probe():
            _log.warning("sessions cannot have what this host should give them", why=why)
        executor_changed: Signal[[Executor]] = Signal()
        pool = Pool(
            store,
            environments,
            in_force,
            lambda: tokens.issue(awake_ms()),
            socket=str(paths.executor_socket),
            server_uid=os.geteuid(),
            boot_id=boot_id(),
            output_dir=paths.state / "executors",
            files=ExecutorFiles(),
            account_of=_account_of,
            account_named=account_named,
            on_change=executor_changed.emit,
            on_notice=notices.add,
        )

        # services
        connections: set[ClientConnection] = set()
        stop_request = StopRequest()
        opened = Opened(
            store=store,
            fanout=fanout,
            pool=pool,
            executor_changed=executor_changed,
            vault=vault,
            grants=Grants(store, vault, in_force, broker),
            leases=broker,
            key_troubles=key_troubles,
            notices=notices,
            environments=environments,
            accounts=Accounts(_account_of, account_named, in_force, file.administrators.is_admin, system=paths.system),
            known=known,
            settings=in_force,
            info=DaemonInfo(
                mode="system" if paths.system else "user",
                started_at=now_ms(),
                paths={"settings": str(paths.config), "state": str(paths.state), "sockets": str(paths.runtime)},
            ),
            spool_dir=paths.state / "spool",
            host_policy=_host_policy(paths, settings),
            boot_id=boot_id(),
            own_spares=not paths.system,
            clients=connections.__len__,
            settings_notices=lambda: (*file.notices(), *sockets.troubles()),
        )
        executor_socket = sockets.open("executor")
        await stack.enter_async_context(broker.running())
        if await store.read(keys.list_):
            broker.request_start()
        services = await stack.enter_async_context(running_services(opened, stop_request))

        # sockets
        tasks = await stack.enter_async_context(anyio.create_task_group())
        recording = ProcessRecording(paths.state, pool.roster, broker.pid)
        executor_changed.subscribe(recording.notify)
        tasks.start_soon(recording.run)
        executor_listener = ExecutorListener(services, in_force)
        tasks.start_soon(serve, executor_socket, executor_listener.run, in_force, attrgetter("hello"))
        client_listener = ClientListener(
            services,
            fanout,
            in_force,
            is_admin=file.administrators.is_admin,
            insider_of=InsiderLookup(pool.roster.by_id).insider_of,
            daemon_uid=os.geteuid(),
            connections=connections,
        )
        tasks.start_soon(serve, sockets.open("client"), client_listener.run, in_force, attrgetter("first_frame"))
        tasks.start_soon(retain, store, file)
        tasks.start_soon(keep_probing, environments)
        tasks.start_soon(refresh_prices, file, broker.refresh_prices)
        tasks.start_soon(service.beat, lambda: store.writing)
        await anyio.lowlevel.checkpoint()  # let these tasks begin before hutchd reports that it is ready
        if paths.system:
            _leave_mark(paths)
        served()
        service.say("READY=1", service.status(f"Serves at {paths.client_socket}"))
        _log.info("hutchd serves", version=__version__, socket=str(paths.client_socket), epoch=store.epoch)

        await until_stopped(services.host, stop_request, file, service, signals)
        fanout.close()
        with anyio.move_on_after(_FAREWELL):
            await client_listener.close(HutchError(Reason.SHUTTING_DOWN))
        tasks.cancel_scope.cancel()
    _log.info("hutchd has stopped")


def _leave_mark(paths: Paths) -> None:
    """Mark the host as one that has a hutchd of its own, so that clients start no private one while it is stopped."""
    try:
        trouble = leave_mark(paths.state, paths.client_socket)
    except OSError as error:
        trouble = f"{error.filename}: {error.strerror}"
    if trouble is not None:
        _log.warning("the mark of this host's hutchd could not be left", why=trouble)


def _environments(in_force: SettingsInForce, paths: Paths, places: Places, stack: AsyncExitStack) -> Environments:
    """Return the environments of this hutchd, the preferred one first."""
    same_user = SameUser(
        output=in_force.current.executors.output, places=places, sandbox=lambda: in_force.current.sandbox
    )
    if not paths.system:
        return Environments(same_user)
    return Environments(_unix_user(in_force, places, stack), same_user)


def _unix_user(in_force: SettingsInForce, places: Places, stack: AsyncExitStack) -> UnixUser:
    """Return the environment for other accounts, which reaches the launcher as the settings say."""
    given = in_force.current.isolation
    command = given.launcher_command or os.path.join(sys.prefix, "bin", "hutch-launcher")
    way = ("sudo", "-n", "--", command) if given.launcher == "sudo" else Path(given.launcher_socket)
    launcher = LauncherClient(way)
    stack.callback(launcher.close)
    return UnixUser(
        launcher,
        output=in_force.current.executors.output,
        places=places,
        dedicated=lambda name: name in in_force.current.accounts.dedicated,
    )


async def _holds(store: Store, executor: str, session: str) -> bool:
    """Return whether an executor has the lease of a session. The broker's leases end with it."""
    row = await store.read(lambda conn: executors.leased_to(conn, session))
    return row is not None and row.id == executor


def _learn(known: KnownSecrets, key: str, credential: Credential) -> None:
    """Mask a credential from its first use on."""
    known.learn(key, credential.secret.reveal())
    if credential.refresh is not None:
        known.learn(key, credential.refresh.token.reveal())


def _own_places(paths: Paths, settings: Settings) -> tuple[str, ...]:
    """Return the paths that no agent may see: state, sockets, settings, the master key."""
    config = paths.config.parent if paths.config.parent.name == "hutch" else paths.config
    places = (paths.state, paths.runtime, config, master_file(paths, settings))
    return tuple(dict.fromkeys(str(place) for place in places))


def _own_programs() -> tuple[str, ...]:
    """Return the directories of Hutch's code outside the executor. No agent may change them."""
    return tuple({str(Path(file).parents[1]) for file in (daemon_file, shared_file)})


def _account_of(uid: int) -> Account:
    """Return the account with this uid. The home of hutchd's own account is HOME."""
    return account_of(uid, home=os.environ.get("HOME") if uid == os.geteuid() else None)


def _host_policy(paths: Paths, settings: Settings) -> Path:
    if settings.permissions.host_policy is not None:
        return Path(settings.permissions.host_policy)
    return paths.config.with_name("policy.toml") if paths.system else Path("/etc/hutch/policy.toml")
