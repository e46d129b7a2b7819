"""What the tables hold, as values: one frozen dataclass per table, its fields the table's columns in order.

Times are whole milliseconds since 1970, lifetimes milliseconds of awake monotonic time of one boot. A field whose
type is not a plain SQLite one (int, float, str, bytes, bool) is kept as JSON and comes back as its type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from hutch_shared import messages as m
from hutch_shared.events import UsageSeen
from hutch_shared.times import to_wire

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
    "to_message",
]

W = TypeVar("W", bound=msgspec.Struct)

RuleEffect = Literal["allow", "ask", "deny"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session. `options.mcp_servers` is empty here; what it held is in `sealed`, by the vault."""

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
    """seq of the newest event; moved by the event tables' functions alone."""
    floor_seq: int = 0
    """seq of the newest event that is no longer kept."""
    turns: int = 0
    """Number of the newest turn; moved by `turns.insert` alone."""
    mode_before_plan: m.PermissionMode | None = None
    """What the mode becomes again when a plan is approved; None is `ask`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """A turn. `number` is given by the store: 1, 2, 3 … in its session."""

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
    """An event as it is kept. `body` is `"data":…` with, if there is one, `,"native":…`: the bytes as they came."""

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
    """A question: what was asked, why, and, once it is settled, what stands."""

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
    """An executor: its launch record, its token (a hash, never itself), its lease (`session`) and its receipt."""

    id: str
    account: str
    uid: int
    agent: str
    environment: str
    created_at: int
    token_hash: bytes
    state: m.ExecutorState = "starting"
    boot_id: str = ""
    """The boot that `token_until` counts in, and that the process was started in."""
    token_until: int = 0
    """The token holds until this many milliseconds of awake monotonic time of `boot_id`."""
    token_uses: int = 0
    token_max_uses: int = 1
    pid: int | None = None
    start_time: int | None = None
    launched: dict[str, Any] | None = None
    """What the environment needs to adopt it again."""
    protocol: int = m.PROTOCOL
    version: str = ""
    epoch: int = 0
    """The daemon epoch that started it."""
    session: str | None = None
    leased_at: int | None = None
    acked_n: int = 0
    """The highest of its event numbers that is stored; moved by `events.append_reported` alone."""
    spool: str | None = None
    log_path: str | None = None
    gone_at: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A credential in its envelope: `sealed` under a data key, that key in `wrapped` under the master key `master`."""

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
    """A rule that a person added: of an account, of a project (`project`) of it, or of one session (`session`)."""

    owner: int
    effect: RuleEffect
    rule: str
    created_at: int
    number: int = 0
    project: str | None = None
    session: str | None = None
    origin: str = ""
    """Where it came from, such as the permission that was answered with `always`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRow:
    """That an owner trusts the policy file at `path` while it has exactly this digest."""

    owner: int
    path: str
    digest: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """Who decided or did what. `number` orders them; `owner` is the uid whose matter it was."""

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
    """The reporter's own name of the record: one that comes again is not counted again."""
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """A line of a usage table: what it is of, over how many turns and rows, how much."""

    of: str
    turns: int
    rows: int
    usage: UsageSeen


def to_message(message: type[W], row: Any, **given: Any) -> W:
    """Return the message whose fields are the row's of the same names; times become the wire's.

    `given` has the fields that the row lacks, or that clients see differently. AttributeError for a field of neither.
    """
    for name in message.__struct_fields__:
        if name not in given:
            given[name] = _on_wire(name, getattr(row, name))
    return message(**given)


def _on_wire(name: str, value: Any) -> Any:
    is_time = isinstance(value, int) and (name == "at" or name.endswith("_at"))
    return to_wire(value) if is_time else value
