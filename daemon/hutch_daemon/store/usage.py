"""The table of usage: tokens and US dollars per turn or request, and their sums."""

from __future__ import annotations

from typing import Final, Literal

from msgspec.structs import replace

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import UsageRow, UsageTotal
from hutch_shared.events import UsageSeen

__all__ = ["USAGE", "add", "spent", "table", "total"]

USAGE: Final = RowMapping("usage", UsageRow, assigned="number")
_OF: Final = {
    "session": "session",
    "account": "account",
    "day": "date(at / 1000, 'unixepoch')",
    "model": "model",
}
_SUMS: Final = (
    "count(DISTINCT turn), count(*),"
    " sum(input_tokens), sum(output_tokens), sum(cache_read_tokens), sum(cache_write_tokens), sum(usd),"
    " sum(searches), count(*) - count(usd), max(why_unknown)"
)


def add(tx: Executes, row: UsageRow) -> bool:
    """Add `row`; return False if a row of the same source and `request` exists."""
    if row.request is not None and USAGE.one(tx, "WHERE source = ? AND request = ?", (row.source, row.request)):
        return False
    USAGE.insert(tx, row)
    return True


def table(
    on: Executes,
    by: Literal["session", "account", "day", "model"],
    *,
    owner: int | None = None,
    session: str | None = None,
    since: int | None = None,
    source: Literal["agent", "broker"] = "agent",
) -> tuple[UsageTotal, ...]:
    """Return one source's sums per session, account, day (UTC) or model, in the order of first use."""
    chosen = {"owner = ?": owner, "session = ?": session, "at >= ?": since}
    terms = ["source = ?", *(term for term, value in chosen.items() if value is not None)]
    values = [source, *(value for value in chosen.values() if value is not None)]
    found = on.execute(
        f"SELECT {_OF[by]} AS line, {_SUMS} FROM usage WHERE {' AND '.join(terms)} GROUP BY line ORDER BY min(number)",  # noqa: S608 names of the code
        values,
    )
    return tuple(
        UsageTotal(
            of, turns, count, UsageSeen(fresh, out, read, written, usd, total=True), searches, unknown, why or ""
        )
        for of, turns, count, fresh, out, read, written, usd, searches, unknown, why in found
    )


def total(on: Executes, session: str) -> UsageSeen | None:
    """Return the total usage of a session as its agent reported it; None if it reported none yet.

    Its dollars are None if those of a turn are unknown.
    """
    lines = table(on, "session", session=session)
    if not lines:
        return None
    return replace(lines[0].usage, usd=None) if lines[0].unknown else lines[0].usage


def spent(on: Executes, session: str) -> float | None:
    """Return the US dollars of a session's requests as the broker counted them; None if a price is unknown."""
    query = "SELECT coalesce(sum(usd), 0.0), count(*) - count(usd) FROM usage WHERE source = 'broker' AND session = ?"
    ((usd, unknown),) = on.execute(query, (session,))
    return None if unknown else float(usd)
