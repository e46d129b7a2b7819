"""Stores each of the broker's request records exactly once: usage for forwarded requests, audit lines for refused ones.

The broker numbers its records from 1 in each run, and repeats them until hutchd acknowledges them. The transaction that
stores a record also stores its number, so that a repeated record is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hutch_daemon.store import audit, meta, sessions, usage
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import UsageRow
from hutch_shared import broker_link as link

__all__ = ["store_records"]

_STORED: Final = "broker_booked"


def store_records(tx: Tx, reported: link.Records, leases: Mapping[str, link.Lease]) -> None:
    """Store the records that were not stored before. `leases` are the live leases, by id."""
    run, _, last = (meta.get(tx, _STORED) or "").rpartition(" ")
    stored = int(last) if run == reported.run else 0
    for record in reported.records:
        if record.n <= stored:
            continue
        of = leases.get(record.lease) or sessions.get(tx, record.session)
        owner = of.owner if of is not None else 0
        if record.refused is not None:
            _refusal(tx, record, owner)
        else:
            usage.add(tx, _usage(record, reported.run, owner, of.account if of is not None else ""))
    meta.put(tx, _STORED, f"{reported.run} {max(stored, reported.records[-1].n)}")


def _usage(record: link.Record, run: str, owner: int, account: str) -> UsageRow:
    return UsageRow(
        at=record.at,
        owner=owner,
        account=account,
        session=record.session,
        turn=None,
        model=record.model,
        source="broker",
        request=f"{run}-{record.n}",
        input_tokens=record.input,
        output_tokens=record.output,
        cache_read_tokens=record.cache_read,
        cache_write_tokens=record.cache_write,
        cache_write_1h_tokens=record.cache_write_1h,
        searches=record.searches,
        usd=record.usd,
        why_unknown=record.why_unknown or None,
    )


def _refusal(tx: Tx, record: link.Record, owner: int) -> None:
    audit.record(
        tx,
        at=record.at,
        actor=f"uid {record.uid}" if record.uid is not None else "nobody known",
        owner=owner,
        action="broker_request",
        outcome="refused",
        session=record.session or None,
        subject=record.lease or None,
        details={"why": record.refused, "path": record.path, "pid": record.pid, "times": record.times},
    )
