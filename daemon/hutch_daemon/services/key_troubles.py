"""Keys that agents need but cannot use. Each session gets a notice for the owner, and another when that is settled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hutch_daemon.store import events
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError
from hutch_shared.events import Notice

__all__ = ["KeyTroubles"]


@dataclass(frozen=True, slots=True)
class _Trouble:
    owner: int
    sentence: str
    sessions: frozenset[str]
    """The sessions that got the notice."""


class KeyTroubles:
    """The unusable keys, by id. They are only in memory: after a restart the broker asks for a key again."""

    def __init__(self, store: Store) -> None:
        """Start without unusable keys."""
        self._store = store
        self._troubles: dict[str, _Trouble] = {}

    async def report(self, key: KeyRow, sessions: Sequence[str], sentence: str) -> None:
        """Record why a key cannot be used; an empty sentence means that it can. Notices are durable on return."""
        if not sentence:
            if key.id in self._troubles:
                await self._store.write(lambda tx: self.settle(tx, key.id))
            return
        before = self._troubles.get(key.id)
        asked = before.sessions if before is not None else frozenset()
        self._troubles[key.id] = _Trouble(key.owner, sentence, asked | set(sessions))
        notice = Notice("key_needed", sentence, {"provider": key.provider, "name": key.name})
        if fresh := set(sessions) - asked:
            await self._store.write(lambda tx: self._append(tx, fresh, notice))

    def settle(self, tx: Tx, key: str) -> None:
        """Settle a key's trouble in the transaction that replaces or deletes the key, with a notice in its sessions."""
        trouble = self._troubles.get(key)
        if trouble is not None:
            settled = Notice("key_settled", "The needed key was added or deleted.")
            self._append(tx, trouble.sessions, settled)
            tx.after_commit(lambda: self._troubles.pop(key, None))

    def sentences(self, owner: int | None) -> tuple[str, ...]:
        """Return a sentence for each unusable key of an owner, or of all owners if `owner` is None."""
        return tuple(trouble.sentence for trouble in self._troubles.values() if owner in (None, trouble.owner))

    def _append(self, tx: Tx, sessions: Collection[str], notice: Notice) -> None:
        for session in sessions:
            with suppress(HutchError):  # the session was removed meanwhile
                events.append(tx, session, None, "notice", notice)
