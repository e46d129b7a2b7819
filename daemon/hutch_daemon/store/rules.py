"""The table of rules that users added, and the table of project policy files that they trust."""

from __future__ import annotations

from typing import Final

from hutch_daemon.store import policy_versions
from hutch_daemon.store.records import Executes, RowMapping, Tx
from hutch_daemon.store.rows import RuleEffect, RuleRow, TrustRow

__all__ = ["RULES", "TRUST", "add", "distrust", "is_trusted", "list_", "list_trusted", "remove", "trust"]

RULES: Final = RowMapping("rules", RuleRow, assigned="number")
TRUST: Final = RowMapping("trust", TrustRow)


def add(tx: Tx, row: RuleRow) -> bool:
    """Add a rule; False if its owner has it already for the same project and session."""
    if _same(tx, row.owner, row.effect, row.rule, row.project, row.session):
        return False
    RULES.insert(tx, row)
    policy_versions.note_change(tx, row.owner)
    return True


def remove(
    tx: Tx, owner: int, effect: RuleEffect, rule: str, *, project: str | None = None, session: str | None = None
) -> bool:
    """Remove exactly this rule; return whether it existed."""
    found = _same(tx, owner, effect, rule, project, session)
    for row in found:
        RULES.delete(tx, "WHERE number = ?", (row.number,))
    if found:
        policy_versions.note_change(tx, owner)
    return bool(found)


def list_(on: Executes, owner: int, *, project: str | None = None, session: str | None = None) -> tuple[RuleRow, ...]:
    """Return the owner's rules that apply to a project and a session, in the order in which they were added."""
    return RULES.all(
        on,
        "WHERE owner = ? AND (project IS NULL OR project = ?) AND (session IS NULL OR session = ?) ORDER BY number",
        (owner, project, session),
    )


def trust(tx: Tx, row: TrustRow) -> None:
    """Trust a file with one digest. A digest trusted earlier for the same path is not trusted any more."""
    distrust(tx, row.owner, row.path)
    TRUST.insert(tx, row)
    policy_versions.note_change(tx, row.owner)


def distrust(tx: Tx, owner: int, path: str) -> bool:
    """Stop trusting the file; return whether it was trusted."""
    trusted = TRUST.delete(tx, "WHERE owner = ? AND path = ?", (owner, path)) > 0
    if trusted:
        policy_versions.note_change(tx, owner)
    return trusted


def is_trusted(on: Executes, owner: int, path: str, digest: str) -> bool:
    """Return whether the owner trusts the file at `path` with exactly this digest."""
    return TRUST.one(on, "WHERE owner = ? AND path = ? AND digest = ?", (owner, path, digest)) is not None


def list_trusted(on: Executes, owner: int) -> tuple[TrustRow, ...]:
    """Return the files that the owner trusts, by path."""
    return TRUST.all(on, "WHERE owner = ? ORDER BY path", (owner,))


def _same(
    on: Executes, owner: int, effect: RuleEffect, rule: str, project: str | None, session: str | None
) -> tuple[RuleRow, ...]:
    return RULES.all(
        on,
        "WHERE owner = ? AND effect = ? AND rule = ? AND project IS ? AND session IS ?",
        (owner, effect, rule, project, session),
    )
