"""Every value that crosses a socket, as types. `methods` says which method takes and gives which.

Times are RFC 3339 in UTC, durations seconds, money US dollars. Decoding ignores fields it does not know, so that a
newer side may add some; a missing field without a default is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from hutch_shared.events import ReportedEvent, UsageSeen

PROTOCOL = 1
"""Of client and executor socket alike. hutchd also speaks to executors of the version before."""


class Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base of all of them: frozen, and defaults are not sent."""


class Nothing(Wire, frozen=True, omit_defaults=True):
    """No parameters, or nothing to say."""


# ---------------------------------------------------------------- words

PermissionMode = Literal["ask", "accept_edits", "plan", "bypass", "unattended"]
WhenNobody = Literal["wait", "deny", "stop"]
TurnState = Literal["queued", "dispatching", "running", "stopping", "completed", "failed", "stopped", "timed_out"]
SessionState = Literal["open", "closed"]
PermissionState = Literal["pending", "allowed", "denied", "answered", "expired", "withdrawn"]
PermissionKind = Literal["tool", "question", "plan"]
Action = Literal["run_command", "read", "edit", "fetch", "search", "mcp", "question", "plan", "other"]
Scope = Literal["once", "session", "always"]
Decision = Literal["allow", "deny", "answer"]
KeysKept = Literal["brokered", "exposed", "none"]
IsolationLevel = Literal["strict", "account", "reduced"]  # decided in hutch_daemon/environments/levels.py
CredentialKind = Literal["api_key", "oauth", "gateway"]
Delivery = Literal["direct", "lease"]
ExecutorState = Literal["starting", "ready", "leased", "detached", "draining", "gone", "quarantined"]
StopHow = Literal["drain", "leave", "stop"]

Cursor = Annotated[int, Meta(ge=-1, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0)]
Short = Annotated[str, Meta(max_length=200)]


# ---------------------------------------------------------------- shared records


class ToolCall(Wire, frozen=True, omit_defaults=True):
    """A tool call in the words that rules and clients know; `agent_tool` and `input` are the agent's own."""

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
    """A narrow rule that `always` would add, and what accepting it means."""

    rule: str
    note: str = ""


class Rules(Wire, frozen=True, omit_defaults=True):
    """Rules in Claude's syntax. deny beats ask beats allow."""

    allow: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class ProjectFile(Wire, frozen=True, omit_defaults=True):
    """The project's own policy file, read by the executor as its account. `text` is bounded to 64 KiB."""

    path: str
    digest: str
    text: str


class Isolation(Wire, frozen=True, omit_defaults=True):
    """What separates this session from others and from Hutch, and why it is no more than that."""

    level: IsolationLevel
    why: str
    insiders: str = ""
    """How a process of the session is told from a person at the client socket, and what would escape it."""
    keys_why: str = ""
    """Why the agent's key is kept as `keys` says, a sentence."""
    asked: IsolationLevel | None = None
    """The least that the session may have: by its opener's wish or the settings. It does not start with less."""
    missing: str = ""
    """What a higher level would need here, and how to get it; empty when there is none higher."""
    limits: str = ""
    """What bounds the session's processes, for people."""


class Limits(Wire, frozen=True, omit_defaults=True):
    """Bounds of a session; None is the setting's default."""

    turn_timeout: Seconds | None = None
    max_turns: int | None = None
    max_usd: float | None = None


class AgentOptions(Wire, frozen=True, omit_defaults=True):
    """What an agent is started with. MCP settings may hold secrets: they are stored encrypted and shown masked."""

    model: str | None = None
    system_prompt: str | None = None
    allowed_tools: tuple[str, ...] = ()
    disallowed_tools: tuple[str, ...] = ()
    mcp_servers: dict[str, dict[str, Any]] = {}
    script: str | None = None
    """For the script runner: the path of the JSONL file that it plays."""


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
    active_state: TurnState | None = None
    pending: int = 0
    queued: int = 0
    usage: UsageSeen | None = None
    credential: str | None = None
    warning: str | None = None
    """Said once at `open_session`: another open session works in the same directory."""


class Turn(Wire, frozen=True, omit_defaults=True):
    id: str
    session: str
    number: int
    state: TurnState
    prompt: str
    queued_at: str
    started_at: str | None = None
    ended_at: str | None = None
    reason: str | None = None
    message: str | None = None
    result: str | None = None
    usage: UsageSeen | None = None
    awaiting_permission: bool = False


class Permission(Wire, frozen=True, omit_defaults=True):
    """Something that waits for a decision, or waited. `digest` binds the decision to the input judged."""

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
    """`rule`, `uid 1000 (hutch 4242)`, `expiry`, `nobody`, `executor gone` …"""
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


class StoreStatus(Wire, frozen=True, omit_defaults=True):
    ok: bool
    journal: str
    path: str
    detail: str = ""
    events: int = 0
    bytes: int = 0
    wal_bytes: int = 0


class BrokerState(Wire, frozen=True, omit_defaults=True):
    """The process that puts the keys in. `idle`: nothing has needed it yet. Counts are of its present run."""

    state: Literal["up", "down", "idle"]
    detail: str = ""
    """Why it is not up, the end of a sentence."""
    leases: int = 0
    streams: int = 0
    requests: int = 0
    refused: int = 0


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
    turns_queued: int = 0
    permissions_pending: int = 0
    clients: int = 0
    notices: tuple[str, ...] = ()
    """What an administrator should look at: quarantined executors, a start loop, a bad settings file."""
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
    """The agent's own id of an earlier conversation."""
    credential: str | None = None
    """The name of the stored key to use, where there are several."""
    idempotency_key: Short | None = None
    account: Short | None = None
    """The Unix account to run as, where it is not the caller's own; for admins and whom the settings allow."""
    isolation: IsolationLevel | None = None
    """The least that it must have; `isolation_unavailable` where that cannot be. The settings may demand more."""


class SubmitPrompt(Wire, frozen=True, omit_defaults=True):
    session: str
    prompt: str
    idempotency_key: Short | None = None
    timeout: Seconds | None = None


class SessionRef(Wire, frozen=True, omit_defaults=True):
    """A session by id, unambiguous prefix of an id, or name."""

    session: str


class TurnRef(Wire, frozen=True, omit_defaults=True):
    turn: str


class ListSessions(Wire, frozen=True, omit_defaults=True):
    state: SessionState | None = None
    all_owners: bool = False
    limit: Count = 200


class Sessions(Wire, frozen=True, omit_defaults=True):
    """The newest, as many as fit into an answer (about 2 MiB)."""

    sessions: tuple[Session, ...]
    more: bool = False
    """There are older ones."""


class ListTurns(Wire, frozen=True, omit_defaults=True):
    session: str
    limit: Count = 200


class Turns(Wire, frozen=True, omit_defaults=True):
    """The newest, oldest of them first, as many as fit into an answer (about 2 MiB)."""

    turns: tuple[Turn, ...]
    more: bool = False
    """There are older ones."""


class FollowEvents(Wire, frozen=True, omit_defaults=True):
    """`session` may be `"*"`: then `after` is a position, else a seq. `journal` names the journal the cursor is of.

    `after=-1` starts at the present head. Events of kinds in `skip` are not sent.
    """

    session: str
    after: Cursor = 0
    journal: str | None = None
    skip: tuple[str, ...] = ()
    answers: bool = False
    """The follower can answer questions: it counts as somebody who is there."""


class Following(Wire, frozen=True, omit_defaults=True):
    follow: int
    """Names this follow on its connection: in `event`, `follow_ended`, `unfollow`."""
    journal: str
    head: int
    """seq (or, for `"*"`, position) of the newest durable event at that moment."""
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
    """The id of a question: those that were asked after it."""


class Permissions(Wire, frozen=True, omit_defaults=True):
    """The oldest, as many as fit into an answer (about 2 MiB)."""

    permissions: tuple[Permission, ...]
    more: bool = False
    """There are others: go on with `after` the last."""


class AnswerPermission(Wire, frozen=True, omit_defaults=True):
    permission: str
    decision: Decision
    scope: Scope = "once"
    rule: str | None = None
    """With scope session or always: the rule to add, in place of the first suggestion."""
    updated_input: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None
    message: str | None = None
    interrupt: bool = False


class InterruptTurn(Wire, frozen=True, omit_defaults=True):
    session: str
    turn: str | None = None


class CloseSession(Wire, frozen=True, omit_defaults=True):
    session: str
    force: bool = False
    """Stop the running turn at once; else the session must be idle."""


class ForkSession(Wire, frozen=True, omit_defaults=True):
    session: str
    name: Short | None = None


class PutApiKey(Wire, frozen=True, omit_defaults=True):
    """Stores a credential. `api_key` goes into the provider's own header, `oauth` and `gateway` as bearer token."""

    provider: str
    secret: str
    name: str = "default"
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    """Where it is sent instead of to the provider."""
    refresh_token: str | None = None
    """Of an OAuth credential; with it go the next two."""
    refresh_url: str | None = None
    client_id: str | None = None
    expires_at: str | None = None


class UseApiKey(Wire, frozen=True, omit_defaults=True):
    """Makes a key the one of sessions that name none."""

    provider: str
    name: str


class ExplainKey(Wire, frozen=True, omit_defaults=True):
    """Which key would be used, in a session or for a provider."""

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
    """How many envelopes were wrapped anew."""


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
    """The last 4 characters of a long secret, else empty."""
    last_used_at: str | None = None
    uses: int = 0
    kind: CredentialKind = "api_key"
    base_url: str | None = None
    chosen: bool = False
    trouble: str = ""
    """Why it cannot be used, a sentence."""


class ApiKeys(Wire, frozen=True, omit_defaults=True):
    keys: tuple[ApiKey, ...]


class GetUsage(Wire, frozen=True, omit_defaults=True):
    session: str | None = None
    by: Literal["session", "account", "day", "model"] = "session"
    since: str | None = None


class UsageRow(Wire, frozen=True, omit_defaults=True):
    """`usage` is what agents report of turns that ended; `broker` what passed the broker, of turns that run as well."""

    of: str
    turns: int
    usage: UsageSeen
    broker: UsageSeen | None = None
    """None: nothing went by the broker. Its `usd` leaves out what has no known price."""
    requests: int = 0
    """How many requests of models the broker counted."""


class UsageTable(Wire, frozen=True, omit_defaults=True):
    rows: tuple[UsageRow, ...]


class ShowPolicy(Wire, frozen=True, omit_defaults=True):
    """`project`: the project's policy file as the client reads it, in place of what an executor sent last."""

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
    """What would be decided for this tool call, in this session or in a directory without one.

    `project` as in `show_policy`.
    """

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
    """JSON lines, each a case."""


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
    """Adds or removes rules of the caller's account, for every project or for the one at `cwd`."""

    add: Rules = Rules()
    remove: Rules = Rules()
    cwd: str | None = None


class TrustPolicy(Wire, frozen=True, omit_defaults=True):
    """Trusts (or no longer) the project's policy file of exactly this digest."""

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
    """A follow ended for `reason`; `after` is the cursor to come back with."""

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
    """The highest daemon epoch that this executor knows."""
    session: str | None = None
    turn: str | None = None
    """The turn it is running, or whose end it has not got acknowledged."""
    last_n: int = 0


class Welcome(Wire, frozen=True, omit_defaults=True):
    acked: int
    daemon_epoch: int
    turn: str | None = None
    """The turn that hutchd believes it to run."""


class GetApiKey(Wire, frozen=True, omit_defaults=True):
    session: str
    provider: str


class KeyGrant(Wire, frozen=True, omit_defaults=True):
    """The secret itself (`direct`), or a lease that only works at the broker."""

    delivery: Delivery
    value: str
    base_url: str | None = None
    auth: Literal["api_key", "bearer"] = "api_key"
    expires_in: float | None = None
    unix_socket: str | None = None
    """Where the broker of a lease listens; `base_url` then names no host that exists."""


class RequestPermission(Wire, frozen=True, omit_defaults=True):
    """Asks for a decision; sent again with the same `ask` it gets the stored decision, or waits on."""

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
    """What stands. `input` is the judged input, which alone may run; `digest` is of it."""

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
    """The walls around an agent, as paths that keep their places inside; of two the deeper one counts.

    `hide` is seen by no agent, whatever it lies in; `show` can be read, `write` changed, beside the working directory.
    """

    program: str
    """bubblewrap."""
    hide: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    home: Literal["tools", "read_only", "hidden"] = "tools"
    """What is seen of the account's home; what an agent writes there goes with it."""
    network: Literal["full", "allow-list", "broker-only"] = "full"
    allow: tuple[str, ...] = ()
    """Hosts for `allow-list`, as the settings have them."""


class AccountSetup(Wire, frozen=True, omit_defaults=True):
    """What an agent has of its account's own set-up, where the account is not that of hutchd."""

    path: Literal["login", "fixed"] = "fixed"
    """PATH as the account's login shell sets it, or as the executor has it."""
    umask: str = ""
    """`auto`, three octal digits, or empty for the executor's own."""


class PrepareSession(Wire, frozen=True, omit_defaults=True):
    """Gives an executor its session: it connects the agent before the first prompt comes."""

    session: str
    agent: str
    cwd: str
    permission_mode: PermissionMode
    options: AgentOptions
    limits: Limits
    spool: str
    """Directory, made for it and owned by its account, that its spool goes to."""
    home: str
    base_url: str | None = None
    resume: str | None = None
    fork: bool = False
    retries: int = 2
    """How often the agent repeats a request that the provider failed."""
    stream_idle: float = 90.0
    """A stream of the provider that is silent that long is taken for dead."""
    permission_expiry: float = 600.0
    spool_bytes: int = 268435456
    sandbox: SandboxSpec | None = None
    """The walls to put around the agent; None: it runs without any."""
    apart: bool = False
    """The account is not that of hutchd: a lease is all that the agent can get hold of, walls or none."""
    setup: AccountSetup = AccountSetup()
    instructions: Literal["all", "project", "none"] = "all"
    """Which instructions files are given to the agent: the account's and the project's, the project's, none."""


class Prepared(Wire, frozen=True, omit_defaults=True):
    agent_session: str | None = None
    agent_version: str | None = None
    keys: KeysKept = "exposed"
    cwd: str | None = None
    """The working directory as the account sees it, symlinks followed: paths are judged against it."""


class ExecutePrompt(Wire, frozen=True, omit_defaults=True):
    session: str
    turn: str
    number: int
    prompt: str
    timeout: float | None = None


class Accepted(Wire, frozen=True, omit_defaults=True):
    accepted: bool
    reason: str | None = None


class InterruptExecutor(Wire, frozen=True, omit_defaults=True):
    turn: str
    timed_out: bool = False


class Interrupted(Wire, frozen=True, omit_defaults=True):
    """After this answer nothing of the turn starts any more; `turn_ended` follows as an event."""

    was_running: bool


class TakeSpool(Wire, frozen=True, omit_defaults=True):
    """Asks for what a dead executor of the account left in `directory`, beyond number `acked`."""

    directory: str
    acked: int


class SpooledEvents(Wire, frozen=True, omit_defaults=True):
    """The next events there, a batch at most. Without any, all was stored, and the file is gone."""

    session: str = ""
    events: tuple[ReportedEvent, ...] = ()


class Shutdown(Wire, frozen=True, omit_defaults=True):
    reason: str
    finish_turn: bool = False


class AckEvents(Wire, frozen=True, omit_defaults=True):
    n: int


class ResolvePaths(Wire, frozen=True, omit_defaults=True):
    session: str
    paths: tuple[str, ...]


class ResolvedPaths(Wire, frozen=True, omit_defaults=True):
    real: dict[str, str]
    """Each path as the account sees it, symlinks followed, `..` gone; one that cannot be resolved is missing."""


class SetMode(Wire, frozen=True, omit_defaults=True):
    session: str
    mode: PermissionMode


class RunNotify(Wire, frozen=True, omit_defaults=True):
    """Runs the notify command as the account; the question goes to its standard input as one JSON line."""

    command: tuple[str, ...]
    question: Permission
    timeout: float
    env: tuple[str, ...] = ()
    """Names of the executor's own environment that it gets too …"""
    values: dict[str, str] = {}
    """… and what hutchd hands it of its own: an executor's environment has been cleared."""


class Notified(Wire, frozen=True, omit_defaults=True):
    ok: bool
    detail: str = ""


# ---------------------------------------------------------------- the executor's boot line (standard input)


class Boot(Wire, frozen=True, omit_defaults=True):
    """One JSON line on a starting executor's standard input: never in argv, environment or a file."""

    executor: str
    token: str
    socket: str
    server_uid: int
    agent: str
    protocol: int = PROTOCOL
    daemon_epoch: int = 0
    memory_limit: int | None = None
    heartbeat: float = 5.0
    """Seconds between signs of life."""
    trial: SandboxSpec | None = None
    """Only try these walls, answer with one line on standard input (what does not hold, by network), and end."""
