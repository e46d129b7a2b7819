"""The wire on one screen: every method, its direction, its parameters and its result.

The parameters of `control` methods must not have duplicate keys. `hot` notifications bypass the general parser and
dispatcher and keep their order. docs/protocol.md is generated from this module.
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
    """One row. A request has a result; a notification has none and is never answered."""

    name: str
    kind: Literal["request", "notification"]
    params: type[msgspec.Struct]
    result: type[msgspec.Struct] | None
    doc: str
    changes: bool = False
    """Whether the method changes state. hutchd refuses such methods to processes of a session."""
    control: bool = True
    hot: bool = False


Table = dict[str, Method]


def _table(*rows: Method) -> Table:
    table = {row.name: row for row in rows}
    assert len(table) == len(rows)
    return table


def _request(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc)


def _changing(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct], doc: str) -> Method:
    return Method(name, "request", params, result, doc, changes=True)


def _notification(name: str, params: type[msgspec.Struct], doc: str, *, hot: bool = False) -> Method:
    return Method(name, "notification", params, None, doc, control=not hot, hot=hot)


_PING = _request("ping", m.Nothing, m.Pong, "Answers at once: the peer is alive and reads.")

# client → hutchd
CLIENT: Final[Table] = _table(
    _PING,
    _request(
        "get_version", m.VersionParams, m.Version, "First call on a connection; refuses a foreign protocol number."
    ),
    _request(
        "get_status", m.Nothing, m.Status, "Health: executors, queue, store, isolation and keys, with the reasons."
    ),
    _changing("open_session", m.OpenSession, m.Session, "Opens a session and leases it an executor."),
    _changing("submit_prompt", m.SubmitPrompt, m.Turn, "Queues a prompt; durable before the reply."),
    _changing(
        "compact_session", m.CompactSession, m.Turn, "Queues a turn that replaces the conversation by a summary."
    ),
    _changing("clear_session", m.ClearSession, m.Turn, "Queues a turn that begins an empty conversation."),
    _request("list_sessions", m.ListSessions, m.Sessions, "The sessions that the caller may see, newest first."),
    _request("get_session", m.SessionRef, m.Session, "One session by id, prefix or name."),
    _request("list_turns", m.ListTurns, m.Turns, "The turns of a session, oldest first."),
    _request("get_turn", m.TurnRef, m.Turn, "One turn."),
    _request(
        "follow_events", m.FollowEvents, m.Following, "Events after the cursor, then live ones: each once, in order."
    ),
    _request("unfollow", m.Unfollow, m.Nothing, "Ends a follow."),
    _request("read_events", m.ReadEvents, m.EventsPage, "A page of history, for pollers."),
    _request("list_permissions", m.ListPermissions, m.Permissions, "Permission requests; by default the pending ones."),
    _changing(
        "answer_permission",
        m.AnswerPermission,
        m.Permission,
        "Decides a permission request; the first decision stands.",
    ),
    _changing(
        "interrupt_turn", m.InterruptTurn, m.Turn, "Stops the running turn; after the reply it starts nothing more."
    ),
    _changing("cancel_turn", m.TurnRef, m.Turn, "Removes a queued turn from the queue."),
    _changing("close_session", m.CloseSession, m.Session, "Ends the session and its processes; its record stays."),
    _changing("delete_session", m.SessionRef, m.Nothing, "Removes a closed session and its record."),
    _changing("fork_session", m.ForkSession, m.Session, "Opens a session that continues this one's conversation."),
    _changing("put_api_key", m.PutApiKey, m.ApiKey, "Stores a key; the secret never comes back."),
    _request("list_api_keys", m.Nothing, m.ApiKeys, "The caller's keys, without their secrets."),
    _changing(
        "delete_api_key", m.DeleteApiKey, m.KeyDeleted, "Deletes a key; its sealed bytes are gone before the reply."
    ),
    _changing("use_api_key", m.UseApiKey, m.Nothing, "Sets the default key of a provider."),
    _request(
        "explain_key", m.ExplainKey, m.KeyExplained, "Which key a session would use, how it is delivered, and why."
    ),
    _changing("rotate_master_key", m.Nothing, m.MasterRotated, "Replaces the master key."),
    _request("get_usage", m.GetUsage, m.UsageTable, "Tokens and dollars, by session, account, day or model."),
    _request("show_policy", m.ShowPolicy, m.PolicyView, "The layers of rules in force and their errors."),
    _request(
        "explain_policy", m.ExplainPolicy, m.Explanation, "The decision that a tool call would get, and the rule."
    ),
    _request("test_policy", m.TestPolicy, m.CasesReport, "Judges cases; counts correct, unsafe and needless answers."),
    _changing("change_rules", m.ChangeRules, m.PolicyView, "Adds or removes rules of the caller's account."),
    _changing("trust_policy", m.TrustPolicy, m.Nothing, "Trusts a project's policy file by digest, or revokes that."),
    _changing("set_permission_mode", m.SetPermissionMode, m.Session, "Changes the mode, also during a turn; audited."),
    _request("read_audit", m.ReadAudit, m.AuditPage, "Decisions, each with its user or rule and its time."),
    _changing("stop_daemon", m.StopDaemon, m.Nothing, "Stops hutchd; drains, leaves or stops live turns."),
    _changing("backup_store", m.BackupStore, m.BackupDone, "Writes a consistent copy of the database."),
)

# hutchd → client
TO_CLIENT: Final[Table] = _table(
    _PING,
    _notification("event", Event, "One event of the follow that `follow` names.", hot=True),
    _notification("follow_ended", m.FollowEnded, "A follow ended; carries the cursor to resume from."),
)

# executor → hutchd
EXECUTOR: Final[Table] = _table(
    _PING,
    _request("hello", m.Hello, m.Welcome, "First call: authenticates the executor; both report their position."),
    _request("get_api_key", m.GetApiKey, m.KeyGrant, "A lease for the broker, or the secret if the owner chose that."),
    _request(
        "request_permission", m.RequestPermission, m.PermissionDecision, "Waits for the decision on one tool call."
    ),
    _request("judge_reads", m.JudgeReads, m.ReadsJudged, "Which instruction files the agent may be given."),
    _notification("report_message", m.ReportMessage, "Events in order; `ack_events` is the receipt.", hot=True),
    _notification("heartbeat", m.Heartbeat, "Sent every few seconds: the running turn, unacknowledged events, memory."),
)

# hutchd → executor
TO_EXECUTOR: Final[Table] = _table(
    _PING,
    _request("prepare_session", m.PrepareSession, m.Prepared, "Assigns a session and connects the agent."),
    _request("execute_prompt", m.ExecutePrompt, m.Accepted, "Starts a turn; idempotent by turn id."),
    _request(
        "interrupt_turn", m.InterruptExecutor, m.Interrupted, "Stops the turn; after the reply it starts nothing more."
    ),
    _request("set_permission_mode", m.SetMode, m.Nothing, "Reports the session's new mode."),
    _request("resolve_paths", m.ResolvePaths, m.ResolvedPaths, "Resolves paths as the account."),
    _request("run_notify", m.RunNotify, m.Notified, "Runs the notify command as the account."),
    _request("take_spool", m.TakeSpool, m.SpooledEvents, "Reads a dead executor's spool and removes what is stored."),
    _request("remove_agent_dir", m.RemoveAgentDir, m.Nothing, "Removes the agent's directory of a removed session."),
    _request(
        "shutdown",
        m.Shutdown,
        m.Nothing,
        "Ends the executor, after the running turn with `finish_turn`; with `if_alone` only without hutchd.",
    ),
    _notification("ack_events", m.AckEvents, "All events up to n are durable.", hot=True),
)
