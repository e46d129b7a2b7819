"""The settings of hutchd: one TOML file and a few environment variables, read into frozen types.

A file with an unknown key is refused, and the error names the nearest known key: a misspelt limit must not be ignored.
Durations are in seconds, sizes in bytes. The file is `HUTCH_CONFIG`, or `hutch.toml` in the configuration directory; if
it does not exist, the defaults apply. SIGHUP reads it again, except for the settings marked as read at start.
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
    "SettingsInForce",
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
    """The settings cannot be used; the text explains why to the author of the file."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SocketSettings(_Section, frozen=True, kw_only=True):
    """`[sockets]`: limits of connections. The frame limits are read at start."""

    client_frame: Bytes = 4 * 1024 * 1024
    executor_frame: Bytes = 32 * 1024 * 1024
    connections: Count = 4000
    connections_per_uid: Count = 1024
    first_frame: Seconds = 5.0
    """The time after which a connection without a complete frame is closed."""
    hello: Seconds = 2.0
    """The same for the executor socket, where the first frame must be `hello`."""
    frame_timeout: Seconds = 30.0
    ping_interval: Seconds = 30.0
    ping_timeout: Seconds = 20.0
    unread_timeout: Seconds = 60.0
    follower_bytes: Bytes = 1024 * 1024
    """The most events, in bytes, that wait in memory for one follower. A slower follower reads from the store."""


class ExecutorSettings(_Section, frozen=True, kw_only=True):
    """`[executors]`: the pool."""

    spares: Annotated[int, Meta(ge=0, le=16)] = 1
    """The number of warm executors per account and agent."""
    spare_agents: tuple[str, ...] = ("claude",)
    """The agents that have warm executors."""
    maximum: Count = 64
    """The most executors at once. Further sessions wait for one."""
    idle_timeout: Seconds = 900.0
    """The time without a turn after which a session's executor is ended. The next prompt starts another one."""
    hello_timeout: Seconds = 30.0
    prepare_timeout: Seconds = 60.0
    adopt_timeout: Seconds = 15.0
    drain_timeout: Seconds = 30.0
    heartbeat_timeout: Seconds = 60.0
    lost_timeout: Seconds = 30.0
    """The time without a connection after which a live executor's turn fails as lost."""
    start_attempts: Count = 5
    start_window: Seconds = 60.0
    """After `start_attempts` failed starts within this time, no start is tried until this time has passed."""
    memory: Bytes | None = None
    """The memory of all executors together above which no executor is started."""
    output: Bytes = 1024 * 1024
    """The size of an executor's log file."""
    spool: Bytes = 256 * 1024 * 1024


class TurnSettings(_Section, frozen=True, kw_only=True):
    """`[turns]`: limits of one turn."""

    timeout: Seconds = 24 * 3600.0
    interrupt_grace: Seconds = 10.0
    """The time after which an agent that has not stopped is killed with all its processes."""
    queued_per_session: Count = 100
    prompt: Bytes = 2 * 1024 * 1024
    retries: Annotated[int, Meta(ge=0, le=20)] = 2
    """The number of times that the agent repeats a request that failed at the provider."""
    stream_idle: Seconds = 90.0
    """The time without data after which a stream from the provider is treated as broken."""


class PermissionSettings(_Section, frozen=True, kw_only=True):
    """`[permissions]`: how tool calls are decided, and how long a permission request waits."""

    mode: Literal["ask", "accept_edits", "plan", "bypass", "unattended"] = "ask"
    when_nobody: Literal["wait", "deny", "stop"] = "wait"
    expiry: Seconds = 600.0
    return_grace: Seconds = 5.0
    """For `deny` and `stop`: the time for which a user counts as present after their last client disconnected."""
    host_policy: str | None = None
    """The host's policy file. Default: `policy.toml` beside the settings; in user mode /etc/hutch/policy.toml."""
    notify: tuple[str, ...] = ()
    notify_env: tuple[str, ...] = ()
    notify_timeout: Seconds = 30.0


class PriceSettings(_Section, frozen=True, kw_only=True):
    """`[providers.NAME.prices.MODEL]`: US dollars per million tokens. They take precedence over the built-in table."""

    input: Annotated[float, Meta(ge=0)]
    output: Annotated[float, Meta(ge=0)]
    cache_read: Annotated[float, Meta(ge=0)] | None = None
    cache_write: Annotated[float, Meta(ge=0)] | None = None
    """For entries that are kept for five minutes. Default: 1.25 times `input`."""
    cache_write_1h: Annotated[float, Meta(ge=0)] | None = None
    """For entries that are kept for an hour. Default: 2 times `input`."""
    search: Annotated[float, Meta(ge=0)] | None = None
    """US dollars per web search that the provider makes. Default: 0.01."""


class ProviderSettings(_Section, frozen=True, kw_only=True):
    """`[providers.NAME]`: a provider of models."""

    base_url: str | None = None
    """The URL for requests whose key has no base URL of its own."""
    delivery: Literal["lease", "direct"] = "lease"
    """`direct` gives the agent the secret itself, which it can then read; the session is shown as exposed."""
    dialect: Literal["anthropic", "openai", "gemini", "bedrock", "vertex"] | None = None
    """The API that the provider speaks. Default: the API of the known provider with this name."""
    prices: dict[str, PriceSettings] = {}
    """The prices of the provider's models, by model."""


class KeySettings(_Section, frozen=True, kw_only=True):
    """`[keys]`: the storage of keys."""

    master: str | None = None
    """The master key's file. Default: `master.key` in the state directory, which hutchd makes at its first start."""
    keyring: bool = False
    """Keep the master key in the OS keyring instead (`pip install 'hutch[keyring]'`)."""
    refuse_exposed: bool = False
    """Refuse a session whose agent could read its key."""


class BrokerSettings(_Section, frozen=True, kw_only=True):
    """`[broker]`: the process that puts the keys into requests. Read when the broker starts."""

    tcp: bool = False
    """Listen on the loopback interface too, for agents that cannot dial a Unix socket."""
    ca_file: str | None = None
    """A file of certificates that are trusted in addition to the system's."""
    proxy: str | None = None
    """The HTTP proxy for providers. Default: HTTPS_PROXY and NO_PROXY of hutchd's environment."""
    lease: Annotated[float, Meta(ge=1)] = 3600.0
    """The lifetime of a lease. hutchd renews it while the executor lives."""
    requests: Count = 1000
    """The number of requests that a lease allows before hutchd must extend it."""
    usd: Annotated[float, Meta(gt=0)] = 5.0
    """Without effect; accepted from earlier versions, in which a lease got its dollars in portions."""
    budget_wait: Seconds = 60.0
    """The time that a request waits for others of its session if the rest of the budget does not cover it."""
    body: Bytes = 32 * 1024 * 1024
    connect_timeout: Seconds = 10.0
    first_byte_timeout: Seconds = 600.0
    chunk_timeout: Seconds = 300.0
    key_timeout: Seconds = 60.0


class SandboxSettings(_Section, frozen=True, kw_only=True):
    """`[sandbox]`: the sandbox of an agent. Paths are absolute, or below the account's home with `~/`."""

    mode: Literal["auto", "require", "off"] = "auto"
    """If no sandbox works here, `auto` runs sessions without one and reports that; `require` refuses them."""
    kind: Literal["any", "bubblewrap", "landlock"] | None = None
    """What may enforce the sandbox. Default: bubblewrap or, where that does not work, Landlock; with `require` only
    bubblewrap."""
    home: Literal["tools", "read_only", "hidden"] = "tools"
    """The part of the account's home that an agent sees: folders of developer tools, all but secrets, or nothing."""
    show: tuple[str, ...] = ()
    """Further paths that an agent may read."""
    write: tuple[str, ...] = ()
    """Further paths that an agent may read and change, in addition to its working directory."""
    hide: tuple[str, ...] = ()
    """Paths that an agent never sees, even if another setting shows them."""
    network: Literal["full", "allow-list", "broker-only"] = "full"
    """The network that an agent reaches: the host's, only HTTP(S) to hosts in `allow`, or only its model's broker."""
    allow: tuple[str, ...] = ()
    """Hosts for `allow-list`: `example.com`, `*.example.com` (its subdomains); ports 80 and 443, or `:port`."""

    def __post_init__(self) -> None:
        """Refuse entries of `allow` that name no host."""
        AllowList.read(self.allow)


class IsolationSettings(_Section, frozen=True, kw_only=True):
    """`[isolation]`: the lowest isolation level of a session. Sessions are refused if the host cannot offer it."""

    require: Literal["strict", "account", "reduced"] | None = None
    """The lowest level. Default: `account` in system mode, `reduced` in user mode. A session may require more."""
    launcher: Literal["unit", "sudo"] = "unit"
    """The way in which hutchd reaches hutch-launcher: the socket of its unit, or a sudo rule. Read at start."""
    launcher_socket: str = "/run/hutch-launcher/launcher.sock"
    """For `unit`: the launcher's socket. Read at start."""
    launcher_command: str | None = None
    """For `sudo`: the command in the rule. Default: `hutch-launcher` beside hutchd. Read at start."""


class AccountSettings(_Section, frozen=True, kw_only=True):
    """`[accounts]`: the account that each user's agents run as, and which of that account's settings they get."""

    map: dict[str, str] = {}
    """The account of each user's agents, by user name. A user who is not listed uses their own account."""
    run_as: dict[str, tuple[str, ...]] = {}
    """Further accounts that each user may choose with `--account`. Administrators may choose any account."""
    dedicated: tuple[str, ...] = ()
    """Accounts that only Hutch uses: when their last session ends, their remaining processes are ended. The launcher's
    list must contain them too."""
    path: Literal["login", "fixed"] = "login"
    """PATH of agents under other accounts: that of the account's login shell, or the launcher's own."""
    umask: Annotated[str, Meta(pattern="^(auto|0?[0-7]{3})$")] = "auto"
    """The umask of agents under other accounts. `auto` is 002 if the working directory is setgid and its group may
    write, so that shared files stay shared; otherwise 022."""
    instructions: Literal["all", "project", "none"] = "all"
    """The CLAUDE.md files that an agent gets: those of the account and the project, only the project's, or none."""


class LimitSettings(_Section, frozen=True, kw_only=True):
    """`[limits]`: limits of one session's processes, and of one account."""

    memory: Bytes | None = None
    """The memory of a session. Default: half of the machine's in system mode, unlimited in user mode."""
    pids: Annotated[int, Meta(ge=16)] | None = None
    """The processes and threads of a session. Default: 4096 in system mode, unlimited in user mode."""
    cpu_weight: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """A session's share of a busy machine, relative to other sessions."""
    open_files: Annotated[int, Meta(ge=256)] = 65536
    """The open files of each process."""
    sessions: Count | None = None
    """The open sessions of an account. Default: 200 in system mode, unlimited in user mode."""
    executors: Count | None = None
    """The executors of an account. Default: a quarter of `executors.maximum` in system mode, unlimited in user mode."""


class StoreSettings(_Section, frozen=True, kw_only=True):
    """`[store]`: the age and the size up to which events are kept."""

    keep_days: Annotated[float, Meta(gt=0)] | None = None
    """The age in days at which events are removed; None keeps them."""
    keep_bytes: Bytes | None = None
    """The size of the database above which the oldest events are removed; None keeps them."""
    wal_bytes: Bytes = 64 * 1024 * 1024
    """The size above which the write-ahead log is emptied. If readers prevent that, hutchd refuses writes once the log
    is eight times as large. Read at start."""


class LogSettings(_Section, frozen=True, kw_only=True):
    """`[logs]`: hutchd's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class AdminSettings(_Section, frozen=True, kw_only=True):
    """`[admins]`: the users who, like uid 0, see and control every session."""

    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


class Settings(_Section, frozen=True, kw_only=True):
    """All sections of the file."""

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
        """Return the limits; in system mode, with the defaults filled in."""
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
        """Return the settings of a provider, or the defaults."""
        return self.providers.get(name, ProviderSettings())


class SettingsInForce:
    """The settings that apply now. Read `current` at each use, because a reload replaces it."""

    __slots__ = ("_system", "current", "limits")

    def __init__(self, settings: Settings, *, system: bool = False) -> None:
        """Start with `settings`; `system` gives the limits their defaults."""
        self._system = system
        self.replace(settings)

    def replace(self, settings: Settings) -> None:
        """Put other settings into force."""
        self.current = settings
        self.limits = settings.bounds(system=self._system)
        """The limits with the defaults of the mode filled in."""


def load(path: Path, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read `path`, if it exists, and `HUTCH_LOG_LEVEL`. Raise SettingsError if the settings cannot be used."""
    return parse(read(path), str(path), environ)


def read(path: Path) -> str:
    """Return the text of the file, empty if it does not exist. Raise SettingsError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def parse(text: str, origin: str, environ: Mapping[str, str] = os.environ) -> Settings:
    """Convert TOML to settings. `origin` names the file in errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{origin} is not TOML: {error}") from None
    if level := environ.get("HUTCH_LOG_LEVEL"):
        logs = tree.setdefault("logs", {})
        if isinstance(logs, dict):
            logs["level"] = level
    _require_known(tree, Settings, "", origin)
    try:
        return msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{origin}: {error}") from None


def _require_known(tree: Any, kind: Any, where: str, origin: str) -> None:
    """Raise SettingsError for the first unknown key, with the nearest known one."""
    if not isinstance(tree, dict):
        return
    if typing.get_origin(kind) is dict:
        for name, value in tree.items():
            _require_known(value, typing.get_args(kind)[1], f"{where}{name}.", origin)
        return
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    known = typing.get_type_hints(kind)
    for name, value in tree.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {where}{near[0]}?" if near else f"known here: {', '.join(sorted(known))}."
            raise SettingsError(f"{origin}: there is no setting {where}{name}; {hint}")
        _require_known(value, _plain(known[name]), f"{where}{name}.", origin)


def _plain(kind: Any) -> Any:
    """Return `X` of `X | None`."""
    if isinstance(kind, types.UnionType):
        return next((one for one in typing.get_args(kind) if one is not type(None)), kind)
    return kind
