"""The type of every value that crosses a socket. `methods` lists the parameters and result of each method.

Times are RFC 3339 in UTC, durations seconds, money US dollars. Decoding ignores unknown fields, so that a newer peer
may add some; a missing field without a default is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from hutch_shared.events import ReportedEvent, TurnKind, UsageSeen

PROTOCOL = 1
"""The protocol version of the client and executor sockets. hutchd also accepts executors of the previous version."""


class Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base class: frozen; defaults are omitted on the wire."""


class Nothing(Wire, frozen=True, omit_defaults=True):
    """No parameters, or an empty result."""


# ---------------------------------------------------------------- words

PermissionMode = Literal["ask", "accept_edits", "plan", "bypass", "unattended"]
WhenNobody = Literal["wait", "deny", "stop"]
TurnState = Literal["queued", "dispatching", "running", "stopping", "completed", "failed", "stopped", "timed_out"]
ShownTurnState = Literal["awaiting_permission", TurnState]
"""The state of a turn as readers see it. A running turn with a pending permission request is `awaiting_permission`."""
SessionState = Literal["open", "closed"]
PermissionState = Literal["pending", "allowed", "denied", "answered", "expired", "withdrawn"]
PermissionKind = Literal["tool", "question", "plan"]
Action = Literal["run_command", "read", "edit", "fetch", "search", "mcp", "question", "plan", "other"]
Scope = Literal["once", "session", "always"]
Decision = Literal["allow", "deny", "answer"]
KeysKept = Literal["brokered", "exposed", "none"]
IsolationLevel = Literal["strict", "account", "reduced"]  # decided in hutch_daemon/environments/levels.py
SandboxKind = Literal["bubblewrap", "landlock"]
Network = Literal["full", "allow-list", "broker-only"]
CredentialKind = Literal["api_key", "oauth", "gateway"]
Delivery = Literal["direct", "lease"]
KillOutcome = Literal["gone", "left", "unknown"]
ExecutorState = Literal["starting", "ready", "leased", "detached", "draining", "gone", "quarantined"]
StopHow = Literal["drain", "leave", "stop"]

Cursor = Annotated[int, Meta(ge=-1, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0)]
Short = Annotated[str, Meta(max_length=200)]


# ---------------------------------------------------------------- shared records


class ToolCall(Wire, frozen=True, omit_defaults=True):
    """A tool call in the common vocabulary of rules and clients; `agent_tool` and `input` are the agent's own."""

    call_id: str
    action: Action
    agent_tool: str
    input: dict[str, Any]
    command: str | None = None
    paths: tuple[str, ...] = ()
    url: str | None = None
    query: str | None = None
    server: str | None = None
    tool: str | None = None
    description: str | None = None
    diff: str | None = None


class Choice(Wire, frozen=True, omit_defaults=True):
    label: str
    description: str = ""


class Question(Wire, frozen=True, omit_defaults=True):
    """One question of an agent; the answer is a label (or several, or free text)."""

    question: str
    header: str = ""
    choices: tuple[Choice, ...] = ()
    several: bool = False


class Suggestion(Wire, frozen=True, omit_defaults=True):
    """A narrow rule that scope `always` would add, and its effect."""

    rule: str
    note: str = ""


class Rules(Wire, frozen=True, omit_defaults=True):
    """Rules in Claude's syntax. deny beats ask beats allow."""

    allow: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class ProjectFile(Wire, frozen=True, omit_defaults=True):
    """The project's policy file, as the executor read it with its account's rights. `text` has at most 64 KiB."""

    path: str
    digest: str
    text: str


class Isolation(Wire, frozen=True, omit_defaults=True):
    """The isolation of a session from other sessions and from Hutch, with the reasons."""

    level: IsolationLevel
    why: str
    insiders: str = ""
    """How hutchd recognises a process of the session at the client socket, and which processes it would miss."""
    keys_why: str = ""
    """The reason for the session's `keys`, a sentence."""
    asked: IsolationLevel | None = None
    """The lowest isolation level that the session accepts, from the request or the settings."""
    missing: str = ""
    """What a higher level needs here and how to get it; empty at the highest level."""
    limits: str = ""
    """The resource limits of the session's processes, as text for the user."""
    sandbox: SandboxKind | None = None
    """What enforces the sandbox; None without one, and in records of earlier versions."""
    network: Network | None = None
    """The network that the agent reaches. Only with `full` may the provider use its own tools. None: not recorded."""
    open: tuple[str, ...] = ()
    """The attacks that remain possible, by their names in `attacks`."""


class InstructionFile(Wire, frozen=True, omit_defaults=True):
    """An instruction file. `bytes` is the size of what the agent was given; `why` says why it was left out or cut."""

    path: str
    bytes: int = 0
    why: str = ""


class Instructions(Wire, frozen=True, omit_defaults=True):
    """The instruction files of a session: those whose text the agent was given, and those that were left out."""

    given: tuple[InstructionFile, ...] = ()
    left_out: tuple[InstructionFile, ...] = ()


class Limits(Wire, frozen=True, omit_defaults=True):
    """The limits of a session; None means the default of the settings."""

    turn_timeout: Seconds | None = None
    max_turns: int | None = None
    max_usd: float | None = None


class AgentOptions(Wire, frozen=True, omit_defaults=True):
    """The start options of an agent. MCP settings may hold secrets: they are stored encrypted and shown masked."""

    model: str | None = None
    system_prompt: str | None = None
    allowed_tools: tuple[str, ...] = ()
    disallowed_tools: tuple[str, ...] = ()
    mcp_servers: dict[str, dict[str, Any]] = {}
    script: str | None = None
    """The path of the JSONL file that the script runner plays."""


class ResourceLimits(Wire, frozen=True, omit_defaults=True):
    """Limits of an executor's processes; None means that there is none, or that it is not known."""

    memory: int | None = None
    """Bytes of all its processes together; without a cgroup, of the private memory of each."""
    pids: int | None = None
    cpu_weight: int | None = None
    open_files: int | None = None
    """Of each process."""


class LimitsApplied(Wire, frozen=True, omit_defaults=True):
    """The limits of an executor: those that the kernel reported at its start, and those that the settings asked for."""

    applied: ResourceLimits
    asked: ResourceLimits


class KillResult(Wire, frozen=True, omit_defaults=True):
    """The result of ending a session's processes. `message` is a clause for the user about what is left.

    `gone`: a search afterwards found nothing. `left`: the processes `left` could not be ended. `unknown`: hutchd could
    not find out.
    """

    outcome: KillOutcome
    message: str
    left: tuple[int, ...] = ()


class Session(Wire, frozen=True, omit_defaults=True):
    id: str
    name: str
    agent: str
    cwd: str
    owner: int
    account: str
    state: SessionState
    created_at: str
    permission_mode: PermissionMode
    when_nobody: WhenNobody
    environment: str
    isolation: Isolation
    keys: KeysKept
    journal: str
    head_seq: int
    turns: int
    options: AgentOptions
    rules: Rules = Rules()
    limits: Limits = Limits()
    agent_session: str | None = None
    forked_from: str | None = None
    executor: str | None = None
    executor_state: ExecutorState | None = None
    active_turn: str | None = None
    active_state: ShownTurnState | None = None
    pending: int = 0
    queued: int = 0
    usage: UsageSeen | None = None
    credential: str | None = None
    instructions: Instructions | None = None
    """The instruction files that the agent was given, and those left out; None until an executor has read them."""
    warning: str | None = None
    """Set by `open_session` when another open session works in the same directory."""
    killed: KillResult | None = None
    """What is left of a closed session's processes, or of an earlier executor of an open one; None if hutchd has ended
    none, or if the session was closed by an earlier version."""
    executor_limits: LimitsApplied | None = None
    """The limits of its executor; None if it has none, or one of an earlier version."""


class Turn(Wire, frozen=True, omit_defaults=True):
    id: str
    session: str
    number: int
    state: ShownTurnState
    prompt: str
    queued_at: str
    started_at: str | None = None
    ended_at: str | None = None
    reason: str | None = None
    message: str | None = None
    result: str | None = None
    usage: UsageSeen | None = None
    awaiting_permission: bool = False
    kind: TurnKind = "prompt"


class Permission(Wire, frozen=True, omit_defaults=True):
    """A permission request, pending or settled. `digest` binds the decision to the judged input."""

    id: str
    session: str
    turn: str
    kind: PermissionKind
    state: PermissionState
    asked_at: str
    call: ToolCall
    digest: str
    expires_at: str | None = None
    why: str = ""
    rule: str | None = None
    layer: str | None = None
    questions: tuple[Question, ...] = ()
    plan: str | None = None
    suggestions: tuple[Suggestion, ...] = ()
    settled_at: str | None = None
    settled_by: str | None = None
    """`rule`, `mode bypass`, `uid 1000 (hutch 4242)`, `expiry`, `nobody`, `executor gone` …"""
    settled_rule: str | None = None
    """The rule that settled the request, or that its decision added."""
    scope: Scope | None = None
    message: str | None = None
    updated_input: dict[str, Any] | None = None
    decided_digest: str | None = None
    answers: dict[str, Any] | None = None


# ---------------------------------------------------------------- client → hutchd


class VersionParams(Wire, frozen=True, omit_defaults=True):
    protocol: int = PROTOCOL
    client: str = ""
    """A name for the audit, such as `hutch 0.1.0`."""
    waiting_state: bool = False
    """The client knows the turn state `awaiting_permission`; for others hutchd calls it `running`."""


class Version(Wire, frozen=True, omit_defaults=True):
    version: str
    protocol: int
    python: str = ""


class Pong(Wire, frozen=True, omit_defaults=True):
    pass


class ExecutorStatus(Wire, frozen=True, omit_defaults=True):
    id: str
    account: str
    agent: str
    state: ExecutorState
    pid: int
    session: str | None = None
    protocol: int = PROTOCOL
    adopted: bool = False
    detail: str = ""
    limits: LimitsApplied | None = None
    """None if it has not connected yet, or is of an earlier version."""


class StoreStatus(Wire, frozen=True, omit_defaults=True):
    ok: bool
    journal: str
    path: str
    detail: str = ""
    events: int = 0
    bytes: int = 0
    wal_bytes: int = 0


class BrokerState(Wire, frozen=True, omit_defaults=True):
    """The broker process. `idle`: not needed yet. The counts are of its current run."""

    state: Literal["up", "down", "idle"]
    detail: str = ""
    """The reason why the broker is not up, as a clause."""
    leases: int = 0
    streams: int = 0
    requests: int = 0
    refused: int = 0
    pid: int = 0
    """Its process; 0 if none is linked."""


class Status(Wire, frozen=True, omit_defaults=True):
    version: str
    protocol: int
    pid: int
    started_at: str
    mode: Literal["user", "system"]
    draining: bool
    store: StoreStatus
    isolation: Isolation
    keys: KeysKept
    master_key: str
    executors: tuple[ExecutorStatus, ...] = ()
    sessions_open: int = 0
    turns_running: int = 0
    """The turns that have begun, including those that wait for a permission."""
    turns_awaiting_permission: int = 0
    turns_queued: int = 0
    permissions_pending: int = 0
    clients: int = 0
    notices: tuple[str, ...] = ()
    """Conditions for an administrator: quarantined executors, a start loop, a bad settings file."""
    paths: dict[str, str] = {}
    broker: BrokerState | None = None


class OpenSession(Wire, frozen=True, omit_defaults=True):
    agent: str
    cwd: str
    name: Short | None = None
    environment: str | None = None
    permission_mode: PermissionMode | None = None
    when_nobody: WhenNobody | None = None
    rules: Rules = Rules()
    limits: Limits = Limits()
    options: AgentOptions = AgentOptions()
    resume: Short | None = None
    """The agent's own id of the conversation to resume."""
    credential: str | None = None
    """The name of the stored key to use; None for the default one."""
    idempotency_key: Short | None = None
    account: Short | None = None
    """The Unix account to run as, if not the caller's own. The settings limit the choice."""
    isolation: IsolationLevel | None = None
    """The lowest acceptable level; `isolation_unavailable` if it cannot be met. The settings may require more."""
    real_cwd: bool = False
    """No component of `cwd` is a link: the session does not start if there is one later."""


class SubmitPrompt(Wire, frozen=True, omit_defaults=True):
    session: str
    prompt: str
    idempotency_key: Short | None = None
    timeout: Seconds | None = None


class CompactSession(Wire, frozen=True, omit_defaults=True):
    """Replaces the conversation by a summary. `words` tell the agent what the summary must keep."""

    session: str
    words: str = ""
    idempotency_key: Short | None = None
    timeout: Seconds | None = None


class ClearSession(Wire, frozen=True, omit_defaults=True):
    """Begins an empty conversation. The session and its record stay."""

    session: str
    idempotency_key: Short | None = None


class SessionRef(Wire, frozen=True, omit_defaults=True):
    """A session by id, unambiguous id prefix, or name."""

    session: str


class TurnRef(Wire, frozen=True, omit_defaults=True):
    turn: str


class ListSessions(Wire, frozen=True, omit_defaults=True):
    state: SessionState | None = None
    all_owners: bool = False
    limit: Count = 200


class Sessions(Wire, frozen=True, omit_defaults=True):
    """The newest sessions, as many as fit into an answer (about 2 MiB)."""

    sessions: tuple[Session, ...]
    more: bool = False
    """Whether older ones exist."""


class ListTurns(Wire, frozen=True, omit_defaults=True):
    session: str
    limit: Count = 200


class Turns(Wire, frozen=True, omit_defaults=True):
    """The newest turns, oldest first, as many as fit into an answer (about 2 MiB)."""

    turns: tuple[Turn, ...]
    more: bool = False
    """Whether older ones exist."""


class FollowEvents(Wire, frozen=True, omit_defaults=True):
    """`after` is a seq or, with session `"*"`, a position, in the journal that `journal` names; -1 is the current head.

    Events of the kinds in `skip` are not sent.
    """

    session: str
    after: Cursor = 0
    journal: str | None = None
    skip: tuple[str, ...] = ()
    answers: bool = False
    """The follower can decide permission requests, so it counts as present."""


class Following(Wire, frozen=True, omit_defaults=True):
    follow: int
    """The id of this follow on its connection, used in `event`, `follow_ended` and `unfollow`."""
    journal: str
    head: int
    """The seq (for `"*"`: position) of the newest durable event when the follow began."""
    oldest: int = 1


class Unfollow(Wire, frozen=True, omit_defaults=True):
    follow: int


class ReadEvents(Wire, frozen=True, omit_defaults=True):
    session: str
    after: Cursor = 0
    limit: Count = 1000
    journal: str | None = None
    skip: tuple[str, ...] = ()


class EventsPage(Wire, frozen=True, omit_defaults=True):
    events: tuple[Raw, ...]
    journal: str
    head: int
    more: bool


class ListPermissions(Wire, frozen=True, omit_defaults=True):
    session: str | None = None
    state: PermissionState | None = "pending"
    limit: Count = 200
    after: str | None = None
    """The id of a permission request: return only later ones."""
    newest: bool = False
    """Return the newest of them, oldest first, instead of the oldest."""


class Permissions(Wire, frozen=True, omit_defaults=True):
    """The oldest permission requests, as many as fit into an answer (about 2 MiB)."""

    permissions: tuple[Permission, ...]
    more: bool = False
    """More exist: call again with `after` set to the last id."""


class AnswerPermission(Wire, frozen=True, omit_defaults=True):
    """A decision. A field that the decision does not use is refused with `invalid_params`."""

    permission: str
    decision: Decision
    scope: Scope = "once"
    rule: str | None = None
    """The rule to add with scope `session` or `always`; None for the first suggestion."""
    updated_input: dict[str, Any] | None = None
    """With `allow`: the input that may run instead of the requested one. With a scope it needs `rule`."""
    answers: dict[str, Any] | None = None
    """With `answer`: an answer for every question, named by its position (`"1"` is the first), its text or its header.

    An answer is a text or, if the question allows several, a list of texts. The record names questions by their text.
    """
    message: str | None = None
    interrupt: bool = False


class InterruptTurn(Wire, frozen=True, omit_defaults=True):
    session: str
    turn: str | None = None


class CloseSession(Wire, frozen=True, omit_defaults=True):
    session: str
    force: bool = False
    """Stop the running turn at once. Without it the session must be idle."""


class ForkSession(Wire, frozen=True, omit_defaults=True):
    session: str
    name: Short | None = None


class PutApiKey(Wire, frozen=True, omit_defaults=True):
    """Stores a credential. `api_key` is sent in the provider's own header, `oauth` and `gateway` as bearer tokens."""

    provider: str
    secret: str
    name: str = "default"
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    """The URL to use in place of the provider's."""
    refresh_token: str | None = None
    """OAuth only, together with `refresh_url` and `client_id`."""
    refresh_url: str | None = None
    client_id: str | None = None
    expires_at: str | None = None


class UseApiKey(Wire, frozen=True, omit_defaults=True):
    """Makes a key the default of sessions that name none."""

    provider: str
    name: str


class ExplainKey(Wire, frozen=True, omit_defaults=True):
    """The session or provider whose key to explain."""

    session: str | None = None
    provider: str | None = None


class KeyExplained(Wire, frozen=True, omit_defaults=True):
    key: ApiKey
    why: str
    delivery: Delivery
    delivery_why: str


class MasterRotated(Wire, frozen=True, omit_defaults=True):
    source: str
    wrapped: int
    """The number of key envelopes that were wrapped with the new master key."""


class DeleteApiKey(Wire, frozen=True, omit_defaults=True):
    provider: str
    name: str = "default"


class ApiKey(Wire, frozen=True, omit_defaults=True):
    id: str
    provider: str
    name: str
    owner: int
    created_at: str
    hint: str
    """The last 4 characters of a long secret; empty for a short one."""
    last_used_at: str | None = None
    uses: int = 0
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    chosen: bool = False
    trouble: str = ""
    """The reason why the key cannot be used, a sentence; empty if it can."""
    remains: str = ""
    """A sentence if a file still has sealed bytes of the key that this one replaced."""


class KeyDeleted(Wire, frozen=True, omit_defaults=True):
    remains: str = ""
    """A sentence if a file still has sealed bytes of the deleted key."""


class ApiKeys(Wire, frozen=True, omit_defaults=True):
    keys: tuple[ApiKey, ...]


class GetUsage(Wire, frozen=True, omit_defaults=True):
    session: str | None = None
    by: Literal["session", "account", "day", "model"] = "session"
    since: str | None = None


class UsageLine(Wire, frozen=True, omit_defaults=True):
    """`usage` is what agents reported for ended turns; `broker` is what the broker counted, running turns included."""

    of: str
    turns: int
    usage: UsageSeen
    broker: UsageSeen | None = None
    """None if nothing passed the broker. `usd` excludes requests without a known price."""
    requests: int = 0
    """The number of model requests that the broker counted."""
    searches: int = 0
    """The number of web searches that the provider made, as the broker counted them."""
    unknown: int = 0
    """The number of requests (without a broker: of turns) whose price is unknown."""
    why_unknown: str = ""
    """One of the reasons, a sentence."""


class UsageTable(Wire, frozen=True, omit_defaults=True):
    rows: tuple[UsageLine, ...]


class ShowPolicy(Wire, frozen=True, omit_defaults=True):
    """`project`: the project's policy file as the client reads it; None for the one that an executor sent last."""

    session: str | None = None
    cwd: str | None = None
    project: ProjectFile | None = None


class PolicyLayer(Wire, frozen=True, omit_defaults=True):
    name: str
    origin: str
    rules: Rules
    in_force: bool = True
    note: str = ""


class PolicyView(Wire, frozen=True, omit_defaults=True):
    layers: tuple[PolicyLayer, ...]
    mode: PermissionMode
    bypass_forbidden: bool = False
    problems: tuple[str, ...] = ()


class ExplainPolicy(Wire, frozen=True, omit_defaults=True):
    """The tool call to judge, in a session or in a directory. `project` as in `show_policy`."""

    agent_tool: str
    input: dict[str, Any]
    session: str | None = None
    cwd: str | None = None
    mode: PermissionMode | None = None
    project: ProjectFile | None = None


class Explanation(Wire, frozen=True, omit_defaults=True):
    decision: Literal["allow", "ask", "deny"]
    why: str
    rule: str | None = None
    layer: str | None = None
    programs: tuple[tuple[str, ...], ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    problems: tuple[str, ...] = ()


class TestPolicy(Wire, frozen=True, omit_defaults=True):
    cases: str
    """JSON Lines, one case per line."""


class CaseResult(Wire, frozen=True, omit_defaults=True):
    id: str
    want: str
    got: str
    right: bool
    rule: str | None = None
    why: str = ""


class CasesReport(Wire, frozen=True, omit_defaults=True):
    total: int
    right: int
    unsafe_allows: tuple[str, ...] = ()
    missed_denies: tuple[str, ...] = ()
    needless_asks: tuple[str, ...] = ()
    cases: tuple[CaseResult, ...] = ()


class ChangeRules(Wire, frozen=True, omit_defaults=True):
    """Adds or removes rules of the caller's account, for all projects or only the one at `cwd`."""

    add: Rules = Rules()
    remove: Rules = Rules()
    cwd: str | None = None


class TrustPolicy(Wire, frozen=True, omit_defaults=True):
    """Trusts the project's policy file with exactly this digest, or revokes the trust."""

    path: str
    digest: str
    trust: bool = True


class SetPermissionMode(Wire, frozen=True, omit_defaults=True):
    session: str
    mode: PermissionMode


class ReadAudit(Wire, frozen=True, omit_defaults=True):
    session: str | None = None
    action: str | None = None
    since: str | None = None
    after: Cursor = 0
    limit: Count = 1000
    outcome: str | None = None


class AuditEntry(Wire, frozen=True, omit_defaults=True):
    """A line of the audit: `actor` did `action`, which concerns the user with uid `owner`.

    `account` and `actor_account` are the names of these users as they were then; lines of earlier versions have none.
    """

    number: int
    at: str
    actor: str
    action: str
    outcome: str
    session: str | None = None
    subject: str | None = None
    rule: str | None = None
    digest: str | None = None
    details: dict[str, Any] = {}
    owner: int | None = None
    account: str | None = None
    actor_account: str | None = None


class AuditPage(Wire, frozen=True, omit_defaults=True):
    entries: tuple[AuditEntry, ...]
    more: bool


class StopDaemon(Wire, frozen=True, omit_defaults=True):
    how: StopHow = "drain"
    timeout: float = 60.0


class BackupStore(Wire, frozen=True, omit_defaults=True):
    path: str


class BackupDone(Wire, frozen=True, omit_defaults=True):
    path: str
    bytes: int
    journal: str


# ---------------------------------------------------------------- hutchd → client


class FollowEnded(Wire, frozen=True, omit_defaults=True):
    """A follow ended for `reason`; `after` is the cursor to resume from."""

    follow: int
    reason: Literal["too_slow", "session_removed", "shutting_down", "store_unavailable"]
    message: str
    after: int


# ---------------------------------------------------------------- executor → hutchd


class Hello(Wire, frozen=True, omit_defaults=True):
    executor: str
    token: str
    protocol: int
    version: str
    epoch_seen: int
    """The highest daemon epoch that this executor has seen."""
    session: str | None = None
    turn: str | None = None
    """The running turn, or the last one while its end is not acknowledged."""
    last_n: int = 0
    abilities: tuple[str, ...] = ()
    """The kinds of turns, besides prompts, that it can run; `offered` for turns with `ExecutePrompt.offered`;
    `agent_dir` if its agent keeps conversations in `PrepareSession.agent_dir`."""


class Welcome(Wire, frozen=True, omit_defaults=True):
    acked: int
    daemon_epoch: int
    turn: str | None = None
    """The turn that hutchd believes the executor runs."""


class GetApiKey(Wire, frozen=True, omit_defaults=True):
    session: str
    provider: str


class KeyGrant(Wire, frozen=True, omit_defaults=True):
    """The secret itself (`direct`), or a lease that works only at the broker."""

    delivery: Delivery
    value: str
    base_url: str | None = None
    auth: Literal["api_key", "bearer"] = "api_key"
    expires_in: float | None = None
    unix_socket: str | None = None
    """The broker's socket for a lease; the host in `base_url` then does not exist."""


class RequestPermission(Wire, frozen=True, omit_defaults=True):
    """Asks for a decision. Sent again with the same `ask`, it gets the stored decision or continues to wait."""

    ask: str
    session: str
    turn: str
    kind: PermissionKind
    call: ToolCall
    cwd: str
    questions: tuple[Question, ...] = ()
    plan: str | None = None
    project: ProjectFile | None = None


class PermissionDecision(Wire, frozen=True, omit_defaults=True):
    """The decision. Only `input`, the judged input, may run; `digest` is its digest."""

    decision: Decision
    state: PermissionState
    input: dict[str, Any]
    digest: str
    message: str | None = None
    interrupt: bool = False
    answers: dict[str, Any] | None = None


class ReportMessage(Wire, frozen=True, omit_defaults=True):
    session: str
    events: tuple[ReportedEvent, ...]


class Heartbeat(Wire, frozen=True, omit_defaults=True):
    turn: str | None = None
    unacked: int = 0
    spooled_bytes: int = 0
    rss_bytes: int = 0


# ---------------------------------------------------------------- hutchd → executor


class SandboxSpec(Wire, frozen=True, omit_defaults=True):
    """The sandbox of an agent. Paths are the same inside as outside; for nested paths the deeper entry applies.

    The agent cannot see `hide`, can read `show`, and can change `write` and the working directory.
    """

    program: str
    """The path of bubblewrap; empty with Landlock."""
    hide: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    home: Literal["tools", "read_only", "hidden"] = "tools"
    """The part of the account's home that the agent sees. Its writes there do not outlive the sandbox."""
    network: Network = "full"
    allow: tuple[str, ...] = ()
    """The hosts for `allow-list`, in the syntax of the settings."""
    kind: SandboxKind = "bubblewrap"
    """What enforces it."""


class SandboxTrial(Wire, frozen=True, omit_defaults=True):
    """The result of trying a sandbox."""

    faults: dict[str, str] = {}
    """Why it does not hold, by network; a fault of `full` is one of every network."""
    abi: int = 0
    """The kernel's Landlock ABI if Landlock was tried and is there."""


class AccountSetup(Wire, frozen=True, omit_defaults=True):
    """The PATH and umask that the agent gets from its account, if the account is not hutchd's own."""

    path: Literal["login", "fixed"] = "fixed"
    """`login`: the PATH that the account's login shell sets; `fixed`: the executor's PATH."""
    umask: str = ""
    """`auto`, three octal digits, or empty for the executor's umask."""


class PrepareSession(Wire, frozen=True, omit_defaults=True):
    """Assigns a session to an executor, which connects the agent before the first prompt."""

    session: str
    agent: str
    cwd: str
    permission_mode: PermissionMode
    options: AgentOptions
    limits: Limits
    spool: str
    """The directory of its spool, which belongs to its account."""
    home: str
    base_url: str | None = None
    resume: str | None = None
    fork: bool = False
    retries: int = 2
    """The number of times that the agent repeats a failed request to the provider."""
    stream_idle: float = 90.0
    """Seconds of silence after which a stream from the provider counts as dead."""
    permission_expiry: float = 600.0
    spool_bytes: int = 268435456
    sandbox: SandboxSpec | None = None
    """The agent's sandbox; None runs it without one."""
    apart: bool = False
    """The account is not hutchd's own, so that the agent can reach at most a lease, even without a sandbox."""
    setup: AccountSetup = AccountSetup()
    instructions: Literal["all", "project", "none"] = "all"
    """The instruction files that the agent gets: those of account and project, of the project, or none."""
    real_cwd: bool = False
    """No component of `cwd` may be a link; otherwise links are resolved."""
    agent_dir: str | None = None
    """The directory for the agent's own files, which belongs to its account; None means `agents/SESSION` beside the
    spool."""
    resume_from: tuple[str, ...] = ()
    """The agent directories of other sessions that may hold the conversation to resume."""
    resume_named: bool = False
    """The user named the conversation to resume: if it is missing, `not_found` instead of a new conversation."""
    recap: str | None = None
    """What Hutch recorded of a conversation that the agent did not keep. A new conversation begins with it."""


class JudgeReads(Wire, frozen=True, omit_defaults=True):
    """Asks which instruction files the agent may be given; each path with its real path, as the account sees it."""

    session: str
    named: dict[str, str] = {}
    """Files that count by their names: CLAUDE.md and the like."""
    imported: dict[str, str] = {}
    """Files that another file names, which an agent may have written."""
    project: ProjectFile | None = None


class ReadsJudged(Wire, frozen=True, omit_defaults=True):
    withheld: dict[str, str] = {}
    """The files that the agent must not be given, by path, each with the reason."""


class RemoveAgentDir(Wire, frozen=True, omit_defaults=True):
    """Removes the directory of a removed session's agent."""

    directory: str


class Prepared(Wire, frozen=True, omit_defaults=True):
    agent_session: str | None = None
    agent_version: str | None = None
    keys: KeysKept = "exposed"
    cwd: str | None = None
    """The working directory with symbolic links resolved as the account; paths are judged against it."""
    instructions: Instructions | None = None
    """The instruction files that the agent was given, and those left out; None if its runner reads none."""


class ExecutePrompt(Wire, frozen=True, omit_defaults=True):
    session: str
    turn: str
    number: int
    prompt: str
    timeout: float | None = None
    kind: TurnKind = "prompt"
    offered: bool = False
    """Another executor, which is gone, may have accepted the prompt: run it only if the agent never got it."""


class Accepted(Wire, frozen=True, omit_defaults=True):
    accepted: bool
    reason: str | None = None


class InterruptExecutor(Wire, frozen=True, omit_defaults=True):
    turn: str
    timed_out: bool = False


class Interrupted(Wire, frozen=True, omit_defaults=True):
    """After this answer the turn starts nothing more; the event `turn_ended` follows."""

    was_running: bool


class TakeSpool(Wire, frozen=True, omit_defaults=True):
    """Reads the events above `acked` that a dead executor of the account left in `directory`."""

    directory: str
    acked: int


class SpooledEvents(Wire, frozen=True, omit_defaults=True):
    """The next batch of events. Empty: all are stored and the spool is removed."""

    session: str = ""
    events: tuple[ReportedEvent, ...] = ()


class Shutdown(Wire, frozen=True, omit_defaults=True):
    reason: str
    finish_turn: bool = False
    if_alone: float | None = None
    """hutchd leaves: end only when it has been away, with no turn running, for this many seconds. An executor of an
    earlier version ends after its turn."""


class AckEvents(Wire, frozen=True, omit_defaults=True):
    n: int


class ResolvePaths(Wire, frozen=True, omit_defaults=True):
    session: str
    paths: tuple[str, ...]


class ResolvedPaths(Wire, frozen=True, omit_defaults=True):
    real: dict[str, str]
    """Each path with symbolic links and `..` resolved as the account; unresolvable paths are missing."""


class SetMode(Wire, frozen=True, omit_defaults=True):
    session: str
    mode: PermissionMode


class RunNotify(Wire, frozen=True, omit_defaults=True):
    """Runs the notify command as the account, with the permission request as one JSON line on standard input."""

    command: tuple[str, ...]
    question: Permission
    timeout: float
    env: tuple[str, ...] = ()
    """The variables of the executor's own environment that the command gets."""
    values: dict[str, str] = {}
    """Variables from hutchd's environment, since an executor's own is cleared at its start."""
    folders: tuple[str, ...] = ()
    """The working directories of the account's open sessions, whose agents could have put programs there."""


class Notified(Wire, frozen=True, omit_defaults=True):
    ok: bool
    detail: str = ""


# ---------------------------------------------------------------- the executor's boot line (standard input)


class Boot(Wire, frozen=True, omit_defaults=True):
    """One JSON line on the standard input of a starting executor; never in argv, the environment or a file."""

    executor: str
    token: str
    socket: str
    server_uid: int
    agent: str
    protocol: int = PROTOCOL
    daemon_epoch: int = 0
    memory_limit: int | None = None
    open_files: int | None = None
    """The limit of open files that it sets for itself and its children, as far as the present limit allows."""
    heartbeat: float = 5.0
    """Seconds between heartbeats."""
    trial: SandboxSpec | None = None
    """Only probe this sandbox: answer with a `SandboxTrial` as one line on standard input, and end."""
