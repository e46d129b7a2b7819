"""The rows of the tables: one frozen dataclass per table. Its fields are the table's columns, in order.

Times are whole milliseconds since 1970. Lifetimes are milliseconds on the monotonic clock of one boot, which stands
still while the machine sleeps. A field whose type SQLite does not have (it has int, float, str, bytes, bool) is stored
as JSON and decoded to its type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hutch_shared import messages as m
from hutch_shared.events import TurnKind, UsageSeen

__all__ = [
    "FORK_MARK",
    "AuditRow",
    "ExecutorRow",
    "KeyRow",
    "LeftDirRow",
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


FORK_MARK: Final = "fork:"
"""The prefix of `agent_session` in a fork that has had no turn; the rest names the conversation to continue."""


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
    """The seq of the newest event. Only `store.events` changes it."""
    floor_seq: int = 0
    """The seq of the newest event that is no longer kept; 0 if all are kept."""
    turns: int = 0
    """The number of the newest turn. Only `turns.insert` changes it."""
    mode_before_plan: m.PermissionMode | None = None
    """The permission mode to return to when a plan is approved; None means `ask`."""
    instructions: m.Instructions | None = None
    """The instruction files that the agent was given, and those left out; None until an executor has reported them."""
    real_cwd: bool = False
    """True if no component of `cwd` may be a link: the client or an executor has resolved them."""
    agent_dir: str | None = None
    """The directory of the agent's own files; None before an executor of this version has prepared the session."""
    recap_due: bool = False
    """True if the agent lost the conversation: the next executor gets a recap of it."""
    killed: m.KillResult | None = None
    """What is left of a closed session's processes; None while it is open, and in rows of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn. The store assigns `number`: 1, 2, 3 … in each session."""

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
    kind: TurnKind = "prompt"
    offered_to: str | None = None
    """The executor, gone since, that may have accepted the prompt: it runs again only if the agent never got it."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A stored event. `body` is `"data":…`, perhaps followed by `,"native":…`: the bytes as they arrived."""

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
    """A permission request: the tool call, the reason why the user is asked, and the decision once it is settled."""

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
    settled_rule: str | None = None
    """The rule that settled the request, or that its decision added."""


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
    """The id of the boot in which the process started."""
    token_until: int = 0
    """The time when the token expires, in ms on the monotonic clock of `boot_id`."""
    token_uses: int = 0
    token_max_uses: int = 1
    pid: int | None = None
    start_time: int | None = None
    launched: dict[str, Any] | None = None
    """The state that the environment needs to adopt the process after a restart of hutchd."""
    protocol: int = m.PROTOCOL
    version: str = ""
    epoch: int = 0
    """The epoch of the hutchd that started the executor."""
    session: str | None = None
    leased_at: int | None = None
    acked_n: int = 0
    """The receipt: the highest number of its events that is stored. Only `events.append_reported` changes it."""
    spool: str | None = None
    log_path: str | None = None
    gone_at: int | None = None
    detail: str = ""
    made_of: dict[str, Any] | None = None
    """The limits, groups, settings and files that the executor was started with; None in rows of earlier versions."""
    served: str | None = None
    """The session that the executor has or had the lease of. It stays when the executor is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A credential: `sealed` with a data key, which is `wrapped` with the master key that has the mark `master`."""

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
    """A rule that a user added: for all sessions, for one `project` directory, or for one `session`."""

    owner: int
    effect: RuleEffect
    rule: str
    created_at: int
    number: int = 0
    project: str | None = None
    session: str | None = None
    origin: str = ""
    """The origin of the rule in words, such as the permission request that the user answered with `always`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftDirRow:
    """The directory of a removed session's agent; an executor of `account` can remove it."""

    path: str
    account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRow:
    """An owner's trust in the policy file at `path` while the file has exactly this digest."""

    owner: int
    path: str
    digest: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A line of the audit: `actor` did `action`, which concerns the user with uid `owner`. `number` is its order."""

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
    account: str | None = None
    """The name of the user `owner` at that time; None in rows of earlier versions."""
    actor_account: str | None = None
    """The name of the user who acted, at that time; None if the actor is no user, and in rows of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Tokens and US dollars of one turn and model (`source` agent) or of one request (`source` broker)."""

    at: int
    owner: int
    account: str
    session: str
    turn: str | None
    model: str
    source: Literal["agent", "broker"] = "agent"
    number: int = 0
    request: str | None = None
    """The reporter's id of the record. A second record with the same id is not counted."""
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    """Tokens written to the cache, those for one hour included."""
    usd: float | None = None
    cache_write_1h_tokens: int = 0
    searches: int = 0
    """Web searches that the provider ran."""
    why_unknown: str | None = None
    """The reason why `usd` is None, in words."""


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """The usage of one session, account, day or model (`of`), summed over `turns` turns and `rows` records."""

    of: str
    turns: int
    rows: int
    usage: UsageSeen
    """Its dollars are the sum of those that are known."""
    searches: int = 0
    unknown: int = 0
    """The number of records whose price is unknown."""
    why_unknown: str = ""
    """One of the reasons."""
