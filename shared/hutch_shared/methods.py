"""The wire on one screen: every method, who may call whom, what it takes and gives.

`control` methods have their parameters checked for duplicate keys; `hot` ones are decoded straight and dispatched in
order, without the general dispatcher. docs/protocol.md is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from hutch_shared import messages as m
from hutch_shared.events import Event

__all__ = ["CLIENT", "EXECUTOR", "TO_CLIENT", "TO_EXECUTOR", "Method", "Table"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row: a request has a result, a notification has none and is never answered."""

    name: str
    kind: Literal["request", "notification"]
    params: type[msgspec.Struct]
    result: type[msgspec.Struct] | None
    doc: str
    changes: bool = False
    """It changes state: refused to processes of a session that dial the client socket."""
    control: bool = True
    hot: bool = False


Table = dict[str, Method]


def _table(*rows: Method) -> Table:
    table = {row.name: row for row in rows}
    assert len(table) == len(rows)
    return table


def _ask(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc)


def _change(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc, changes=True)


def _tell(name: str, params: type[msgspec.Struct], doc: str, *, hot: bool = False) -> Method:
    return Method(name, "notification", params, None, doc, control=not hot, hot=hot)


_PING = _ask("ping", m.Nothing, m.Pong, "Answers at once; says that the other side is alive and reads.")

# client → hutchd
CLIENT: Final[Table] = _table(
    _PING,
    _ask("get_version", m.VersionParams, m.Version, "First on a connection; refuses another protocol number."),
    _ask("get_status", m.Nothing, m.Status, "Health: executors, queue, store, isolation and keys, with the reasons."),
    _change("open_session", m.OpenSession, m.Session, "Opens a session and leases it an executor."),
    _change("submit_prompt", m.SubmitPrompt, m.Turn, "Queues a prompt; durable before the reply."),
    _ask("list_sessions", m.ListSessions, m.Sessions, "Sessions that the caller may see, newest first."),
    _ask("get_session", m.SessionRef, m.Session, "One session by id, prefix or name."),
    _ask("list_turns", m.ListTurns, m.Turns, "The turns of a session, oldest first."),
    _ask("get_turn", m.TurnRef, m.Turn, "One turn."),
    _ask("follow_events", m.FollowEvents, m.Following, "History after the cursor, then live: each once, in order."),
    _ask("unfollow", m.Unfollow, m.Nothing, "Ends a follow."),
    _ask("read_events", m.ReadEvents, m.EventsPage, "A page of history, for pollers."),
    _ask("list_permissions", m.ListPermissions, m.Permissions, "Questions, by default those that wait."),
    _change("answer_permission", m.AnswerPermission, m.Permission, "Decides; the first decision stands."),
    _change("interrupt_turn", m.InterruptTurn, m.Turn, "Stops the running turn; nothing starts after the reply."),
    _change("cancel_turn", m.TurnRef, m.Turn, "Takes a queued turn out of the queue."),
    _change("close_session", m.CloseSession, m.Session, "Ends the session and its processes; its record stays."),
    _change("delete_session", m.SessionRef, m.Nothing, "Removes a closed session and its record."),
    _change("fork_session", m.ForkSession, m.Session, "A new session that goes on from this one's conversation."),
    _change("put_api_key", m.PutApiKey, m.ApiKey, "Stores a key; the secret never comes back."),
    _ask("list_api_keys", m.Nothing, m.ApiKeys, "The caller's keys, without their secrets."),
    _change("delete_api_key", m.DeleteApiKey, m.Nothing, "Forgets a key."),
    _change("use_api_key", m.UseApiKey, m.Nothing, "Chooses the key of sessions that name none."),
    _ask("explain_key", m.ExplainKey, m.KeyExplained, "Which key would be used and how it is delivered, and why."),
    _change("rotate_master_key", m.Nothing, m.MasterRotated, "Puts a new master key in the old one's place."),
    _ask("get_usage", m.GetUsage, m.UsageTable, "Tokens and dollars, by session, account, day or model."),
    _ask("show_policy", m.ShowPolicy, m.PolicyView, "The layers of rules in force, and what is wrong with them."),
    _ask("explain_policy", m.ExplainPolicy, m.Explanation, "What would be decided for a tool call, by which rule."),
    _ask("test_policy", m.TestPolicy, m.CasesReport, "Runs cases and counts right, unsafe and needless answers."),
    _change("change_rules", m.ChangeRules, m.PolicyView, "Adds or removes rules of the caller's account."),
    _change("trust_policy", m.TrustPolicy, m.Nothing, "Trusts a project's policy file of one digest, or no longer."),
    _change("set_permission_mode", m.SetPermissionMode, m.Session, "Changes the mode, also in mid-turn; recorded."),
    _ask("read_audit", m.ReadAudit, m.AuditPage, "Who decided what, when, by which rule."),
    _change("stop_daemon", m.StopDaemon, m.Nothing, "Ends hutchd: drain live turns, leave them running, or stop them."),
    _change("backup_store", m.BackupStore, m.BackupDone, "Writes a consistent copy of the database."),
)

# hutchd → client
TO_CLIENT: Final[Table] = _table(
    _PING,
    _tell("event", Event, "One event of a follow; `follow` names it.", hot=True),
    _tell("follow_ended", m.FollowEnded, "A follow ended, with the cursor to come back with."),
)

# executor → hutchd
EXECUTOR: Final[Table] = _table(
    _PING,
    _ask("hello", m.Hello, m.Welcome, "First on a connection: proves the executor, tells where both stand."),
    _ask("get_api_key", m.GetApiKey, m.KeyGrant, "A lease for the broker, or the secret where the owner chose so."),
    _ask("request_permission", m.RequestPermission, m.PermissionDecision, "Waits for the decision about one call."),
    _tell("report_message", m.ReportMessage, "Events in order; the receipt is `ack_events`.", hot=True),
    _tell("heartbeat", m.Heartbeat, "Sent every few seconds: what it runs and what it still holds."),
)

# hutchd → executor
TO_EXECUTOR: Final[Table] = _table(
    _PING,
    _ask("prepare_session", m.PrepareSession, m.Prepared, "Gives the executor its session and connects the agent."),
    _ask("execute_prompt", m.ExecutePrompt, m.Accepted, "Starts a turn; idempotent by turn id."),
    _ask("interrupt_turn", m.InterruptExecutor, m.Interrupted, "Stops the turn; nothing starts after the reply."),
    _ask("set_permission_mode", m.SetMode, m.Nothing, "The session's mode changed."),
    _ask("resolve_paths", m.ResolvePaths, m.ResolvedPaths, "Resolves paths as the account."),
    _ask("run_notify", m.RunNotify, m.Notified, "Runs the notify command as the account."),
    _ask("take_spool", m.TakeSpool, m.SpooledEvents, "Reads a dead executor's spool; what is stored already goes."),
    _ask("shutdown", m.Shutdown, m.Nothing, "Ends the executor; `finish_turn` lets the running turn end first."),
    _tell("ack_events", m.AckEvents, "All events up to n are durable.", hot=True),
)
