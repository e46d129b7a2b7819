"""Counts, for each user, the changes of the stored data by which tool calls are judged.

The data are the user's rules, the project files that the user trusts, and the modes of the user's sessions. A verdict
carries the number that was read before its data; the transaction that carries the verdict out compares the numbers, so
that no verdict outlives the data that it was made of.
"""

from __future__ import annotations

from functools import partial

from hutch_daemon.store import meta
from hutch_daemon.store.records import Executes, Tx

__all__ = ["current", "note_change"]


def current(on: Executes, owner: int) -> int:
    """Return the number of changes so far. Read it before, or in the same snapshot as, the data that it covers."""
    return int(meta.get(on, _key(owner)) or 0)


def note_change(tx: Tx, owner: int) -> None:
    """Count a change in its transaction. The store emits `policy_changed` after the commit."""
    meta.put(tx, _key(owner), str(current(tx, owner) + 1))
    tx.after_commit(partial(tx.policy_changed, owner))


def _key(owner: int) -> str:
    return f"policy of {owner}"
