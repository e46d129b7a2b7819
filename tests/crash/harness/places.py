"""The failpoints: named places where a process can be killed. docs/crash.md is generated from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Place:
    """A failpoint: its process, the step of the process there, and whether random runs use it."""

    process: Literal["hutchd", "executor"]
    what: str
    under_load: bool = True


FAILPOINTS: dict[str, Place] = {
    "store.before_new_database": Place("hutchd", "a new database is about to get its name", under_load=False),
    "store.before_migration": Place("hutchd", "a migration is about to begin", under_load=False),
    "store.in_migration": Place("hutchd", "in the middle of a migration's transaction", under_load=False),
    "store.before_commit": Place("hutchd", "a group of units of work is about to be committed"),
    "store.after_commit": Place("hutchd", "a group is committed, and no caller has its result"),
    "store.before_publish": Place("hutchd", "events are durable, and no follower has them"),
    "events.insert": Place("hutchd", "events have their numbers, and are not inserted yet"),
    "executors.insert": Place("hutchd", "a token is issued, and its launch record is not stored yet"),
    "executors.lease": Place("hutchd", "an executor is about to be leased to a session"),
    "pool.started": Place("hutchd", "an executor's process exists, and its pid is not recorded yet"),
    "turns.insert": Place("hutchd", "a prompt has its number, and is not queued yet"),
    "turn.queued": Place("hutchd", "a prompt is queued, and not committed yet"),
    "turn.stored": Place("hutchd", "a prompt is durable, and its submitter has no answer"),
    "turn.dispatching": Place("hutchd", "a turn is recorded as dispatched, and its executor has not received it"),
    "turn.offered": Place(
        "hutchd",
        "a prompt whose executor died is queued again, for the next one to look whether it ran",
        under_load=False,
    ),
    "turn.accepted": Place("hutchd", "an executor has accepted a prompt, and the turn is not recorded as running"),
    "turn.end": Place("hutchd", "a turn's end is written, and not committed yet"),
    "turn.stopping": Place("hutchd", "a turn is being stopped, and its executor has no request", under_load=False),
    "hello.admit": Place("hutchd", "a token is valid, and its use is not recorded yet"),
    "hello.welcome": Place("hutchd", "an executor is attached, and has no answer"),
    "report.came": Place("hutchd", "an executor's events have arrived, and none is stored yet"),
    "report.committed": Place("hutchd", "an executor's events are durable, and hutchd has not acted on them"),
    "report.ack": Place("hutchd", "an executor's events are durable, and its receipt is not sent"),
    "permissions.insert": Place("hutchd", "a permission request is about to be stored"),
    "permissions.settle": Place("hutchd", "a decision is about to be stored"),
    "desk.settle": Place("hutchd", "a decision is written with its event and audit row, and not committed yet"),
    "answer.stored": Place("hutchd", "a decision is durable, and the client that made it has no answer"),
    "adoption.rows": Place("hutchd", "launch records are read, and no executor has connected"),
    "adoption.settled": Place("hutchd", "all living executors are adopted"),
    "spool.stored": Place("hutchd", "a dead executor's spool is stored, and not removed yet"),
    "executor.hello": Place("executor", "it is connected, and has not sent its token"),
    "executor.accepted": Place("executor", "it has accepted a prompt, and hutchd has no answer"),
    "executor.decided": Place("executor", "it has received a decision, and has not acted on it"),
    "executor.turn_over": Place("executor", "a turn has ended, and its end is not reported yet"),
    "spool.before_write": Place("executor", "events are about to be written to the spool"),
    "spool.before_sync": Place("executor", "events are in the spool file, and not synced to the disk"),
    "spool.after_sync": Place("executor", "events are in the spool, and also in memory"),
    "spool.before_removal": Place("executor", "a dead executor's spool is stored, and about to be removed"),
    "keys.file.written": Place("hutchd", "a key file is written beside the one that it will replace", under_load=False),
    "keys.master.renamed": Place("hutchd", "a new master key has replaced the old one", under_load=False),
    "keys.put.stored": Place("hutchd", "a key is stored, and not in the ledger yet", under_load=False),
    "keys.delete.struck": Place(
        "hutchd", "a key is removed from the ledger, and not from the store yet", under_load=False
    ),
    "keys.rotate.begun": Place("hutchd", "a rotation of the master key is recorded as begun", under_load=False),
    "keys.rotate.wrapped": Place("hutchd", "all envelopes are wrapped with the new master key", under_load=False),
    "keys.rotate.ledger": Place("hutchd", "the ledger names the new master key", under_load=False),
    "keys.rotate.finished": Place("hutchd", "the rotation is about to be recorded as finished", under_load=False),
    "keys.rotate.batch": Place("hutchd", "a batch of envelopes is wrapped with the new master key", under_load=False),
}
