"""The settings of hutchd: one TOML file and a few environment variables, read into frozen types.

A key that is not known refuses the file and names the nearest one that is: a misspelt limit is no missing limit.
Durations are seconds, sizes bytes. The file is `HUTCH_CONFIG`, else `hutch.toml` in the configuration directory; a file
that does not exist means the defaults. SIGHUP reads it again; what only counts at start says so below.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hutch_shared.allow_list import AllowList

__all__ = [
    "AccountSettings",
    "BrokerSettings",
    "ExecutorSettings",
    "IsolationSettings",
    "KeySettings",
    "LimitSettings",
    "LogSettings",
    "PermissionSettings",
    "PriceSettings",
    "ProviderSettings",
    "SandboxSettings",
    "Settings",
    "SettingsError",
    "SocketSettings",
    "StoreSettings",
    "TurnSettings",
    "load",
    "parse",
    "read",
]

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1024)]


class SettingsError(ValueError):
    """The settings cannot be used; the text is a sentence for the person who wrote them."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SocketSettings(_Section, frozen=True, kw_only=True):
    """`[sockets]`: bounds of connections. Count at start: the frame limits."""

    client_frame: Bytes = 4 * 1024 * 1024
    executor_frame: Bytes = 32 * 1024 * 1024
    connections: Count = 4000
    connections_per_uid: Count = 1024
    first_frame: Seconds = 5.0
    """A connection that has not sent one complete frame by then is closed."""
    hello: Seconds = 2.0
    """The same at the executor socket, where the first frame must be `hello`."""
    frame_timeout: Seconds = 30.0
    ping_interval: Seconds = 30.0
    ping_timeout: Seconds = 20.0
    unread_timeout: Seconds = 60.0
    follower_bytes: Bytes = 1024 * 1024
    """What one follower may have waiting in memory; beyond it, it reads from the store."""


class ExecutorSettings(_Section, frozen=True, kw_only=True):
    """`[executors]`: the pool."""

    spares: Annotated[int, Meta(ge=0, le=16)] = 1
    """Warm executors per account and agent."""
    spare_agents: tuple[str, ...] = ("claude",)
    maximum: Count = 64
    """Sessions beyond it wait for an executor."""
    idle_timeout: Seconds = 900.0
    """A leased executor whose session is idle that long is let go; the next prompt resumes in another."""
    hello_timeout: Seconds = 30.0
    prepare_timeout: Seconds = 60.0
    adopt_timeout: Seconds = 15.0
    drain_timeout: Seconds = 30.0
    heartbeat_timeout: Seconds = 60.0
    lost_timeout: Seconds = 30.0
    """How long a live executor may be without its connection before its turn is settled as lost."""
    start_attempts: Count = 5
    start_window: Seconds = 60.0
    """More failed starts than `start_attempts` in this time stop further ones until it has passed."""
    memory: Bytes | None = None
    """Memory of all executors together: spares are not started beyond it."""
    output: Bytes = 1024 * 1024
    """How much of an executor's own output is kept in its log file."""
    spool: Bytes = 256 * 1024 * 1024


class TurnSettings(_Section, frozen=True, kw_only=True):
    """`[turns]`: one prompt and what follows."""

    timeout: Seconds = 24 * 3600.0
    interrupt_grace: Seconds = 10.0
    """An agent that has not stopped by then is killed with all its processes."""
    queued_per_session: Count = 100
    prompt: Bytes = 2 * 1024 * 1024
    retries: Annotated[int, Meta(ge=0, le=20)] = 2
    """How often the agent repeats a request that the provider failed."""
    stream_idle: Seconds = 90.0
    """A stream of the provider that is silent that long is taken for dead."""


class PermissionSettings(_Section, frozen=True, kw_only=True):
    """`[permissions]`: what is asked, of whom, for how long."""

    mode: Literal["ask", "accept_edits", "plan", "bypass", "unattended"] = "ask"
    when_nobody: Literal["wait", "deny", "stop"] = "wait"
    expiry: Seconds = 600.0
    return_grace: Seconds = 5.0
    """For `deny` and `stop`: how long after the last client went somebody still counts as there."""
    host_policy: str | None = None
    """Default: `policy.toml` beside the settings in system mode, /etc/hutch/policy.toml in user mode."""
    notify: tuple[str, ...] = ()
    notify_env: tuple[str, ...] = ()
    notify_timeout: Seconds = 30.0


class PriceSettings(_Section, frozen=True, kw_only=True):
    """`[providers.NAME.prices.MODEL]`: US dollars for a million tokens, ahead of the table that comes along."""

    input: Annotated[float, Meta(ge=0)]
    output: Annotated[float, Meta(ge=0)]
    cache_read: Annotated[float, Meta(ge=0)] | None = None
    cache_write: Annotated[float, Meta(ge=0)] | None = None


class ProviderSettings(_Section, frozen=True, kw_only=True):
    """`[providers.NAME]`."""

    base_url: str | None = None
    """Where keys that name no base URL of their own are sent."""
    delivery: Literal["lease", "direct"] = "lease"
    """`direct` hands the secret itself to the agent, which can then read it: the session says so."""
    dialect: Literal["anthropic", "openai", "gemini", "bedrock", "vertex"] | None = None
    """Whose API it speaks; default: that of the provider of this name."""
    prices: dict[str, PriceSettings] = {}
    """By model."""


class KeySettings(_Section, frozen=True, kw_only=True):
    """`[keys]`."""

    master: str | None = None
    """File of the master key; default `master.key` in the state directory, made at first start."""
    keyring: bool = False
    """Keep the master key in the OS keyring instead (`pip install 'hutch[keyring]'`)."""
    refuse_exposed: bool = False
    """Refuse a session whose agent could read its key."""


class BrokerSettings(_Section, frozen=True, kw_only=True):
    """`[broker]`: the process that puts the keys in. Counts when the broker starts."""

    tcp: bool = False
    """Listen on the loopback interface too, for agents that cannot dial a Unix socket."""
    ca_file: str | None = None
    """Certificates that are trusted beside the system's."""
    proxy: str | None = None
    """Default: HTTPS_PROXY and NO_PROXY as hutchd finds them."""
    lease: Annotated[float, Meta(ge=1)] = 3600.0
    """How long a lease holds without hutchd, which renews it while its executor lives."""
    requests: Count = 1000
    """So many requests a lease may make without hutchd."""
    usd: Annotated[float, Meta(gt=0)] = 5.0
    """In a session with a budget: so many dollars of it a lease has in advance."""
    body: Bytes = 32 * 1024 * 1024
    connect_timeout: Seconds = 10.0
    first_byte_timeout: Seconds = 600.0
    chunk_timeout: Seconds = 300.0
    key_timeout: Seconds = 60.0


class SandboxSettings(_Section, frozen=True, kw_only=True):
    """`[sandbox]`: the walls around an agent. Paths are absolute, or below the account's home with `~/`."""

    mode: Literal["auto", "require", "off"] = "auto"
    """`auto` has sessions without walls where there can be none, and says so; `require` refuses them."""
    home: Literal["tools", "read_only", "hidden"] = "tools"
    """What an agent sees of the account's home: known homes of developers' tools; all but secrets; nothing."""
    show: tuple[str, ...] = ()
    """What else it may read …"""
    write: tuple[str, ...] = ()
    """… and change, beside its working directory."""
    hide: tuple[str, ...] = ()
    """What it may not see, whatever shows it."""
    network: Literal["full", "allow-list", "broker-only"] = "full"
    """What it reaches: all that the host does; HTTP(S) at the hosts in `allow`; only the model, by the broker."""
    allow: tuple[str, ...] = ()
    """Hosts for `allow-list`: `example.com`, `*.example.com` (its subdomains), each with `:port` or for 80 and 443."""

    def __post_init__(self) -> None:
        """Refuse entries that name no host."""
        AllowList.read(self.allow)


class IsolationSettings(_Section, frozen=True, kw_only=True):
    """`[isolation]`: the least that separates a session from others. What a host cannot give is refused."""

    require: Literal["strict", "account", "reduced"] | None = None
    """Default: `account` in system mode, `reduced` in user mode. A session may ask for more."""
    launcher: Literal["unit", "sudo"] = "unit"
    """How hutchd reaches hutch-launcher: at the socket of its unit, or through one sudo rule. Counts at start."""
    launcher_socket: str = "/run/hutch-launcher/launcher.sock"
    """Counts at start."""
    launcher_command: str | None = None
    """For `sudo`: the command of the rule; default `hutch-launcher` beside hutchd. Counts at start."""


class AccountSettings(_Section, frozen=True, kw_only=True):
    """`[accounts]`: which person's agents run as which Unix account, and what of that account's set-up they have."""

    map: dict[str, str] = {}
    """Person to account, by name; who is not named is his own account."""
    run_as: dict[str, tuple[str, ...]] = {}
    """Person to the accounts that he may name with `--account`; admins may name any."""
    dedicated: tuple[str, ...] = ()
    """Accounts that nobody but Hutch uses: what is left of them is swept away when their last session ends. The
    launcher's own list must name them too."""
    path: Literal["login", "fixed"] = "login"
    """PATH of agents under other accounts: as the account's login shell sets it, or the launcher's own."""
    umask: Annotated[str, Meta(pattern="^(auto|0?[0-7]{3})$")] = "auto"
    """Of agents under other accounts. `auto`: 002 where the working directory is setgid and its group may write, so
    that a shared tree stays shared; else 022."""
    instructions: Literal["all", "project", "none"] = "all"
    """Which CLAUDE.md files an agent is given: the account's and the project's, the project's, none."""


class LimitSettings(_Section, frozen=True, kw_only=True):
    """`[limits]`: bounds of one session's processes, and of one account."""

    memory: Bytes | None = None
    """Of a session; default: half of the machine's in system mode, none in user mode."""
    pids: Annotated[int, Meta(ge=16)] | None = None
    """Processes and threads of a session; default: 4096 in system mode, none in user mode."""
    cpu_weight: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """A session's share of a busy machine, against the others'."""
    open_files: Annotated[int, Meta(ge=256)] = 65536
    """Of each process."""
    sessions: Count | None = None
    """Open sessions of an account at once; default: 200 in system mode, no limit in user mode."""
    executors: Count | None = None
    """Executors of an account at once; default: a quarter of `executors.maximum` in system mode, all in user mode."""


class StoreSettings(_Section, frozen=True, kw_only=True):
    """`[store]`: what is kept."""

    keep_days: Annotated[float, Meta(gt=0)] | None = None
    keep_bytes: Bytes | None = None
    wal_bytes: Bytes = 64 * 1024 * 1024
    """Beyond it the write-ahead log is emptied; at eight times as much, held by a reader, nothing is accepted.
    Counts at start."""


class LogSettings(_Section, frozen=True, kw_only=True):
    """`[logs]`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class AdminSettings(_Section, frozen=True, kw_only=True):
    """`[admins]`: who sees and steers everything, beside uid 0."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


class Settings(_Section, frozen=True, kw_only=True):
    """All of it."""

    sockets: SocketSettings = SocketSettings()
    executors: ExecutorSettings = ExecutorSettings()
    turns: TurnSettings = TurnSettings()
    permissions: PermissionSettings = PermissionSettings()
    providers: dict[str, ProviderSettings] = {}
    keys: KeySettings = KeySettings()
    broker: BrokerSettings = BrokerSettings()
    sandbox: SandboxSettings = SandboxSettings()
    isolation: IsolationSettings = IsolationSettings()
    accounts: AccountSettings = AccountSettings()
    limits: LimitSettings = LimitSettings()
    store: StoreSettings = StoreSettings()
    logs: LogSettings = LogSettings()
    admins: AdminSettings = AdminSettings()

    def bounds(self, *, system: bool) -> LimitSettings:
        """Return the limits with their defaults filled in; in user mode there are none but those that are given."""
        if not system:
            return self.limits
        given = self.limits
        return LimitSettings(
            memory=given.memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,
            pids=given.pids or 4096,
            cpu_weight=given.cpu_weight,
            open_files=given.open_files,
            sessions=given.sessions or 200,
            executors=given.executors or max(1, self.executors.maximum // 4),
        )

    def provider(self, name: str) -> ProviderSettings:
        """Return the provider's settings, or the defaults."""
        return self.providers.get(name, ProviderSettings())


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read `path`, if it is there, and `HUTCH_LOG_LEVEL`; SettingsError with a sentence otherwise."""
    return parse(read(path), str(path), environ)


def read(path: Path) -> str:
    """Return the text of the file, empty where there is none; SettingsError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def parse(text: str, origin: str, environ: Mapping[str, str] = os.environ) -> Settings:
    """Turn TOML into settings. `origin` names the file in the errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{origin} is not TOML: {error}") from None
    if level := environ.get("HUTCH_LOG_LEVEL"):
        logs = tree.setdefault("logs", {})
        if isinstance(logs, dict):
            logs["level"] = level
    _refuse_unknown(tree, Settings, "", origin)
    try:
        return msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{origin}: {error}") from None


def _refuse_unknown(tree: Any, kind: Any, where: str, origin: str) -> None:
    """Walk keys beside the types and name the first key that is not known, with the nearest one that is."""
    if not isinstance(tree, dict):
        return
    if typing.get_origin(kind) is dict:
        for name, value in tree.items():
            _refuse_unknown(value, typing.get_args(kind)[1], f"{where}{name}.", origin)
        return
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    known = typing.get_type_hints(kind)
    for name, value in tree.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {where}{near[0]}?" if near else f"known here: {', '.join(sorted(known))}."
            raise SettingsError(f"{origin}: there is no setting {where}{name}; {hint}")
        _refuse_unknown(value, _plain(known[name]), f"{where}{name}.", origin)


def _plain(kind: Any) -> Any:
    """Take `X` out of `X | None`."""
    if isinstance(kind, types.UnionType):
        return next((one for one in typing.get_args(kind) if one is not type(None)), kind)
    return kind
