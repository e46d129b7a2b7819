"""The rows of the tables: one frozen dataclass for each table; its fields are the table's columns in order.

Times are whole milliseconds since 1970. Lifetimes are milliseconds of the awake monotonic time of one boot. A field
whose type is not one of SQLite's (int, float, str, bytes, bool) is stored as JSON and read back as its type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hutch_shared import messages as m
from hutch_shared.events import UsageSeen

__all__ = [
    "AuditRow",
    "ExecutorRow",
    "KeyRow",
    "PermissionRow",
    "RuleEffect",
    "RuleRow",
    "SessionRow",
    "StoredEvent",
    "TrustRow",
    "TurnRow",
    "UsageRow",
    "UsageTotal",
]

RuleEffect = Literal["allow", "ask", "deny"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session. `options.mcp_servers` is empty here; the vault encrypts its content into `sealed`."""

    id: str
    name: str
    owner: int
    account: str
    agent: str
    cwd: str
    created_at: int
    permission_mode: m.PermissionMode
    when_nobody: m.WhenNobody
    environment: str
    isolation: m.Isolation
    state: m.SessionState = "open"
    keys: m.KeysKept = "exposed"
    options: m.AgentOptions = field(default_factory=m.AgentOptions)
    sealed: bytes | None = None
    rules: m.Rules = field(default_factory=m.Rules)
    limits: m.Limits = field(default_factory=m.Limits)
    agent_session: str | None = None
    forked_from: str | None = None
    credential: str | None = None
    idempotency_key: str | None = None
    closed_at: int | None = None
    head_seq: int = 0
    """seq of the newest event; only `store.events` changes it."""
    floor_seq: int = 0
    """seq of the newest event that is no longer kept."""
    turns: int = 0
    """Number of the newest turn; only `turns.insert` changes it."""
    mode_before_plan: m.PermissionMode | None = None
    """The mode to return to when a plan is approved; None means `ask`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn. The store assigns `number`: 1, 2, 3 … in its session."""

    id: str
    session: str
    prompt: str
    queued_at: int
    number: int = 0
    state: m.TurnState = "queued"
    idempotency_key: str | None = None
    timeout: float | None = None
    executor: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    reason: str | None = None
    message: str | None = None
    result: str | None = None
    usage: UsageSeen | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A stored event. `body` is `"data":…`, followed by `,"native":…` if it has one: the bytes as they arrived."""

    position: int
    session: str
    seq: int
    owner: int
    turn: str | None
    at: int
    kind: str
    body: bytes

    def __repr__(self) -> str:
        return f"<{self.kind} {self.session}#{self.seq} @{self.position} {len(self.body)} B>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionRow:
    """A permission request: the call, why it was asked, and the decision once it is settled."""

    id: str
    session: str
    turn: str
    executor: str
    ask: str
    kind: m.PermissionKind
    asked_at: int
    call: m.ToolCall
    cwd: str
    digest: str
    state: m.PermissionState = "pending"
    expires_at: int | None = None
    why: str = ""
    rule: str | None = None
    layer: str | None = None
    questions: tuple[m.Question, ...] = ()
    plan: str | None = None
    suggestions: tuple[m.Suggestion, ...] = ()
    settled_at: int | None = None
    settled_by: str | None = None
    scope: m.Scope | None = None
    message: str | None = None
    interrupt: bool = False
    updated_input: dict[str, Any] | None = None
    decided_digest: str | None = None
    answers: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRow:
    """An executor: its launch record, the hash of its token, its lease (`session`) and its receipt."""

    id: str
    account: str
    uid: int
    agent: str
    environment: str
    created_at: int
    token_hash: bytes
    state: m.ExecutorState = "starting"
    boot_id: str = ""
    """The boot in which the process started; `token_until` is a time of it."""
    token_until: int = 0
    """When the token expires, in awake monotonic milliseconds of `boot_id`."""
    token_uses: int = 0
    token_max_uses: int = 1
    pid: int | None = None
    start_time: int | None = None
    launched: dict[str, Any] | None = None
    """What the environment needs to adopt the process again."""
    protocol: int = m.PROTOCOL
    version: str = ""
    epoch: int = 0
    """The epoch of the hutchd that started it."""
    session: str | None = None
    leased_at: int | None = None
    acked_n: int = 0
    """The receipt: the highest stored number of its events; only `events.append_reported` changes it."""
    spool: str | None = None
    log_path: str | None = None
    gone_at: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """An encrypted credential: `sealed` under a data key, which is `wrapped` under the master key `master`."""

    id: str
    owner: int
    provider: str
    name: str
    created_at: int
    sealed: bytes
    wrapped: bytes
    master: str
    kind: m.CredentialKind = "api_key"
    version: int = 1
    hint: str = ""
    updated_at: int | None = None
    last_used_at: int | None = None
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """A rule that a user added: for everything, for one `project` directory, or for one `session`."""

    owner: int
    effect: RuleEffect
    rule: str
    created_at: int
    number: int = 0
    project: str | None = None
    session: str | None = None
    origin: str = ""
    """Where the rule comes from, such as the permission request that was answered with `always`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRow:
    """An owner's trust in the policy file at `path`, as long as it has exactly this digest."""

    owner: int
    path: str
    digest: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A line of the audit: `actor` did `action`, which concerns the user with uid `owner`. `number` orders lines."""

    at: int
    owner: int
    actor: str
    action: str
    outcome: str
    number: int = 0
    session: str | None = None
    subject: str | None = None
    rule: str | None = None
    digest: str | None = None
    details: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Tokens and dollars of one turn and model (`source` agent) or of one request (`source` broker)."""

    at: int
    owner: int
    account: str
    session: str
    turn: str | None
    model: str
    source: Literal["agent", "broker"] = "agent"
    number: int = 0
    request: str | None = None
    """The reporter's name of the record; a record with the same name is not counted twice."""
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """The usage of one session, account, day or model (`of`), summed over `turns` turns and `rows` records."""

    of: str
    turns: int
    rows: int
    usage: UsageSeen
