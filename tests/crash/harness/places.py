"""The named places where a process can be made to die: see docs/crash.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Place:
    """A failpoint: in which process, what happens there, and whether the load of the harness passes it."""

    process: Literal["hutchd", "executor"]
    what: str
    under_load: bool = True


FAILPOINTS: dict[str, Place] = {
    "store.before_new_database": Place("hutchd", "a new database is about to get its name", under_load=False),
    "store.before_migration": Place("hutchd", "a migration is about to begin", under_load=False),
    "store.in_migration": Place("hutchd", "in the middle of a migration's transaction", under_load=False),
    "store.before_commit": Place("hutchd", "a group of units is about to be committed"),
    "store.after_commit": Place("hutchd", "a group is committed, nobody knows it yet"),
    "store.before_publish": Place("hutchd", "events are durable, no follower has them yet"),
    "events.insert": Place("hutchd", "numbers are given, the events are not inserted yet"),
    "executors.insert": Place("hutchd", "a token is issued, its launch record is not kept yet"),
    "executors.lease": Place("hutchd", "a session is about to be given to an executor"),
    "pool.started": Place("hutchd", "an executor's process is there, its pid is not recorded yet"),
    "turns.insert": Place("hutchd", "a prompt has its number, it is not queued yet"),
    "turn.queued": Place("hutchd", "a prompt is queued, not yet committed"),
    "turn.stored": Place("hutchd", "a prompt is durable, its submitter does not know"),
    "turn.dispatching": Place("hutchd", "a turn is said to be dispatched, its executor has nothing yet"),
    "turn.accepted": Place("hutchd", "an executor took a prompt, the turn does not run in the record yet"),
    "turn.end": Place("hutchd", "a turn's end is written, not yet committed"),
    "turn.stopping": Place("hutchd", "a turn is being stopped, its executor does not know", under_load=False),
    "hello.admit": Place("hutchd", "a token was found good, its use is not recorded yet"),
    "hello.welcome": Place("hutchd", "an executor is attached, it does not know"),
    "report.came": Place("hutchd", "an executor's events came, nothing of them is stored yet"),
    "report.committed": Place("hutchd", "an executor's events are durable, nothing follows from them yet"),
    "report.ack": Place("hutchd", "an executor's events are durable, its receipt is not sent"),
    "permissions.insert": Place("hutchd", "a question is about to be kept"),
    "permissions.settle": Place("hutchd", "a question is about to be decided"),
    "desk.settle": Place("hutchd", "a decision is written with its event and audit, not yet committed"),
    "answer.stored": Place("hutchd", "a decision is durable, who made it does not know"),
    "adoption.rows": Place("hutchd", "launch records were read, no executor has dialled in"),
    "adoption.settled": Place("hutchd", "the executors that live are back"),
    "spool.stored": Place("hutchd", "a dead executor's spool is stored, and still there"),
    "executor.hello": Place("executor", "it is connected, its token is not sent yet"),
    "executor.accepted": Place("executor", "it took a prompt, hutchd does not know"),
    "executor.decided": Place("executor", "it got a decision, nothing ran yet"),
    "executor.turn_over": Place("executor", "a turn is over, its end is not reported yet"),
    "spool.before_write": Place("executor", "events are about to go into the spool"),
    "spool.before_sync": Place("executor", "events are in the spool file, not on the disk"),
    "spool.after_sync": Place("executor", "events are in the spool, and still in memory"),
    "spool.before_removal": Place("executor", "a dead executor's spool was stored, and is about to go"),
    "keys.file.written": Place("hutchd", "a file of the keys is written beside the one it replaces", under_load=False),
    "keys.master.renamed": Place("hutchd", "a new master key has the old one's place", under_load=False),
    "keys.put.stored": Place("hutchd", "a key is stored, the ledger does not say so yet", under_load=False),
    "keys.delete.struck": Place("hutchd", "a key is struck from the ledger, not yet from the store", under_load=False),
    "keys.rotate.begun": Place("hutchd", "a rotation of the master key is announced", under_load=False),
    "keys.rotate.wrapped": Place("hutchd", "all envelopes are wrapped anew", under_load=False),
    "keys.rotate.ledger": Place("hutchd", "the ledger names the new master key", under_load=False),
    "keys.rotate.finished": Place("hutchd", "the rotation is about to be called finished", under_load=False),
    "keys.rotate.batch": Place("hutchd", "a batch of envelopes is wrapped anew", under_load=False),
}
