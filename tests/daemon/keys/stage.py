"""A vault on a real store, and a session that requests keys."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hutch_daemon.keys.broker import Broker
from hutch_daemon.keys.broker_boot import BrokerPaths
from hutch_daemon.keys.grants import Grants
from hutch_daemon.keys.key_supply import KeyReport
from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.keys.master import MasterKeys, load_master_keys
from hutch_daemon.keys.oauth import FreshKeys
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_daemon.store import sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow, SessionRow, TurnRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.ids import new_id
from hutch_shared.processes import start_time
from hutch_shared.secret import Secret
from tests.fakes.stores import new_database

OWNER = os.getuid()
KEY = "sk-rehearsal-0123456789"
HOLDER = LeaseHolder("x-1", os.getuid(), os.getpid(), start_time(os.getpid()) or 0)


async def report_nothing(key: KeyRow, sessions: Sequence[str], trouble: str) -> None:
    """Ignore trouble with a key."""


@dataclass
class VaultStage:
    """A vault, its store and its files."""

    folder: Path
    store: Store
    vault: Vault
    master: MasterKeys

    async def again(self) -> Vault:
        """Open the vault as a restarted hutchd does."""
        self.master = load_master_keys(self.folder / "master.key", {})
        self.vault = await Vault.load(self.store, self.master, self.folder / "vault.ledger")
        return self.vault

    def broker(self, settings: Settings | SettingsInForce, holds: Any, report: KeyReport = report_nothing) -> Broker:
        """Return hutchd's side of a broker on this vault and store."""
        in_force = settings if isinstance(settings, SettingsInForce) else SettingsInForce(settings)
        return Broker(
            self.store,
            in_force,
            BrokerPaths.under(self.folder, self.folder),
            holds,
            environ={"PATH": os.defpath},
            fresh=FreshKeys(self.vault, in_force),
            report=report,
        )

    def grants(self, settings: Settings, broker: Broker | None = None) -> Grants:
        return Grants(self.store, self.vault, SettingsInForce(settings), broker)

    async def put(self, name: str = "default", secret: str = KEY, provider: str = "anthropic", **more: Any) -> m.ApiKey:
        return await self.vault.put(OWNER, provider, name, Secret(secret), **more)


def session(name: str = "s-1", **more: Any) -> SessionRow:
    facts: dict[str, Any] = {
        "id": name,
        "name": name,
        "owner": OWNER,
        "account": "somebody",
        "agent": "claude",
        "cwd": "/",
        "created_at": 0,
        "permission_mode": "ask",
        "when_nobody": "wait",
        "environment": "same-user",
        "isolation": m.Isolation(level="reduced", why=""),
        **more,
    }
    return SessionRow(**facts)


@asynccontextmanager
async def vault_stage(folder: Path) -> AsyncIterator[VaultStage]:
    """Open a store and its vault in `folder`."""
    async with Store.open(new_database(folder / "hutch.db")) as store:
        master = load_master_keys(folder / "master.key", {})
        yield VaultStage(folder, store, await Vault.load(store, master, folder / "vault.ledger"), master)


async def keep_session(store: Store, row: SessionRow) -> None:
    """Store a session with a running turn."""
    turn = TurnRow(id=new_id("turn"), session=row.id, prompt="go", queued_at=0, state="running")

    def keep(tx: Tx) -> None:
        sessions.insert(tx, row)
        turns.insert(tx, turn)

    await store.write(keep)
