"""Complete, plausible rows for a store; tests change the fields that matter to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from hutch_daemon.store import events, executors, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import ExecutorRow, PermissionRow, SessionRow, StoredEvent, TurnRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.events import ReportedEvent
from hutch_shared.times import to_wire

AT = 1_700_000_000_000


def session_row(session: str = "s-aaaa", **fields: Any) -> SessionRow:
    plain: dict[str, Any] = {
        "name": session,
        "owner": 1000,
        "account": "ada",
        "agent": "script",
        "cwd": "/home/ada/work",
        "created_at": AT,
        "permission_mode": "ask",
        "when_nobody": "wait",
        "environment": "same-user",
        "isolation": m.Isolation(level="reduced", why="a test"),
    }
    return SessionRow(id=session, **{**plain, **fields})


def turn_row(turn: str = "t-1", session: str = "s-aaaa", **fields: Any) -> TurnRow:
    return TurnRow(**{"id": turn, "session": session, "prompt": "go", "queued_at": AT, **fields})


def executor_row(executor: str = "x-1", **fields: Any) -> ExecutorRow:
    plain: dict[str, Any] = {
        "account": "ada",
        "uid": 1000,
        "agent": "script",
        "environment": "same-user",
        "created_at": AT,
        "token_hash": executor.encode(),
    }
    return ExecutorRow(id=executor, **{**plain, **fields})


def permission_row(permission: str = "p-1", **fields: Any) -> PermissionRow:
    plain: dict[str, Any] = {
        "session": "s-aaaa",
        "turn": "t-1",
        "executor": "x-1",
        "ask": f"a-{permission}",
        "kind": "tool",
        "asked_at": AT,
        "call": m.ToolCall(call_id="c1", action="run_command", agent_tool="Bash", input={"command": "ls"}),
        "cwd": "/home/ada/work",
        "digest": "d1",
    }
    return PermissionRow(id=permission, **{**plain, **fields})


def reported(*numbers: int, size: int = 10, kind: str = "text", turn: str | None = "t-1") -> list[ReportedEvent]:
    """Events of an executor with these numbers, each with a payload of about `size` bytes."""
    return [
        ReportedEvent(
            n=n,
            at=to_wire(AT + n),
            kind=kind,  # type: ignore[arg-type]
            turn=turn,
            data=msgspec.Raw(msgspec.json.encode({"text": f"{n} ".ljust(size, "x")})),
        )
        for n in numbers
    ]


async def with_session(store: Store, session: str = "s-aaaa", executor: str = "x-1", owner: int = 1000) -> None:
    """Insert a session and an executor that reports for it."""

    def unit(tx: Tx) -> None:
        sessions.insert(tx, session_row(session, owner=owner))
        executors.insert(tx, executor_row(executor))

    await store.write(unit)


async def with_turn(store: Store, turn: str = "t-1", session: str = "s-aaaa", **fields: Any) -> TurnRow:
    """Queue a turn."""
    row, _ = await store.write(partial(turns.insert, row=turn_row(turn, session, **fields)))
    return row


async def report(
    store: Store, *numbers: int, session: str = "s-aaaa", executor: str = "x-1", size: int = 10, kind: str = "text"
) -> list[StoredEvent]:
    """Append an executor's events with these numbers."""
    batch: Sequence[ReportedEvent] = reported(*numbers, size=size, kind=kind)
    stored, _ = await store.write(
        partial(events.append_reported, executor=executor, session=session, events=batch),
    )
    return stored
