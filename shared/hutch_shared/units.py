"""What a service manager is told about Hutch: systemd's units and launchd's list, as texts. The only place of them.

Pure. The last line of each text is a seal over the rest, so that a file that a person changed is told from one that an
earlier Hutch wrote: the first is theirs, the second may be replaced.

Whatever a unit sets holds for all that its process starts. So there are two kinds of it:

- hutchd of a host starts nothing but its broker: executors are the launcher's children. It is shut in as far as it can
  be. What stays open is what it lives from: the sockets, the network for the broker, and `/proc`, where it looks at
  the processes of other accounts (so neither ProtectProc nor PrivateUsers). It cannot put up a sandbox in there itself,
  and need not: whether agents can have one is tried where agents run.
- Of a user's hutchd, and of hutch-launcher, executors and agents are children. What they set changes nothing that an
  agent sees or may do (no PrivateTmp, ProtectHome, ProtectSystem, PrivateDevices), filters none of its calls
  (SystemCallFilter, MemoryDenyWriteExecute, LockPersonality, RestrictSUIDSGID, RestrictNamespaces), and leaves it the
  sandbox around it: with anything mounted over a part of /proc (ProtectKernelLogs, ProtectKernelTunables, ProtectProc)
  the kernel refuses bubblewrap a /proc of its own. In a user's manager any filter brings NoNewPrivileges, and takes
  away a bubblewrap that is set-uid.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, Literal

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "ACCOUNT",
    "CARRIED",
    "CARRIED_OF_USER",
    "LABEL",
    "LAUNCHER",
    "LAUNCHER_CONFIG",
    "LAUNCHER_SOCKET",
    "SERVICE",
    "SOCKETS",
    "launchd",
    "seal_of",
    "systemd",
    "templates",
]

SERVICE: Final = "hutchd.service"
SOCKETS: Final = {"client": "hutchd.socket", "executor": "hutchd-executor.socket"}
"""The unit of each socket, by the name under which hutchd is passed it."""
LAUNCHER: Final = "hutch-launcher.service"
LAUNCHER_SOCKET: Final = "hutch-launcher.socket"
LAUNCHER_CONFIG: Final = "/etc/hutch/launcher.toml"
LABEL: Final = "io.hutch.hutchd"
ACCOUNT: Final = "hutch"
"""The account of a host's hutchd."""
CARRIED: Final = ("HUTCH_CONFIG", "HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR")
CARRIED_OF_USER: Final = ("XDG_CONFIG_HOME", "XDG_STATE_HOME")
"""Variables that say where things are: the service gets them as the person has them; the second, a user's alone."""

_WATCHDOG: Final = 60
_SUBGROUP: Final = 254
"""The systemd that knows DelegateSubgroup."""
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_SEAL: Final = re.compile(r"(?s)(.*\n)(?:# |<!-- )sealed by hutch: ([0-9a-f]{64})(?: -->)?\n")
_HOMES: Final = ("/home", "/root", "/run/user")
_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - named, not used
_SHUT: Final = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    "PrivateDevices=yes",
    "PrivateMounts=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "LockPersonality=yes",
    "MemoryDenyWriteExecute=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RemoveIPC=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged @resources",
    "SystemCallErrorNumber=EPERM",
)
_LAUNCHER_CAPS: Final = "CAP_SETUID CAP_SETGID CAP_SETPCAP CAP_KILL CAP_CHOWN CAP_DAC_READ_SEARCH"


def systemd(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    system: bool,
    launcher: Sequence[str] = (),
    credential: str | None = None,
    version: int = 0,
) -> dict[str, str]:
    """Return the text of each unit by its file name; `argv` is hutchd, its program an absolute path.

    Of `environ` what is `CARRIED` counts. Of a host also: `launcher` is hutch-launcher, `credential` the file with the
    sealed master key, `version` that of the systemd that reads it (0: not known). HutchError INVALID_PARAMS for a
    control character in any of it, which no unit could hold, and for a relative path.
    """
    carried = _carried(environ, system)
    runtime = _runtime(carried, system)
    usual = runtime in ("/run/hutch", "%t/hutch")
    needs = f"network-online.target {LAUNCHER_SOCKET}"
    service = [
        "[Unit]",
        "Description=Hutch: runs coding agents" + (" for the people of this host" if system else ""),
        *([f"After={needs}", f"Wants={needs}"] if system else []),
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        *([f"User={ACCOUNT}", f"Group={ACCOUNT}"] if system else []),
        _start([*argv, *(["--system"] if system else [])]),
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"Sockets={' '.join(SOCKETS.values())}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in carried.items()),
        *(_APART if system else _TOGETHER),
        "Restart=on-failure",
        "RestartSec=1",
        "# 2: its settings or arguments cannot be used, which another start does not mend.",
        "RestartPreventExitStatus=2",
        "# The first start of a new version may have a large database to change.",
        "TimeoutStartSec=10min",
        "TimeoutStopSec=90",
        f"WatchdogSec={_WATCHDOG}",
        "LimitCORE=0",
        "LimitNOFILE=65536",
        "UMask=0077",
    ]
    if usual:
        mode = "0755" if system else "0700"
        service += ["RuntimeDirectory=hutch", f"RuntimeDirectoryMode={mode}", "RuntimeDirectoryPreserve=yes"]
    if system:
        service += _of_host(argv, carried, credential)
    else:
        service += [
            "# No hardening beyond this: in a user's manager each brings NoNewPrivileges, which agents would inherit.",
        ]
    service += ["", "[Install]", f"WantedBy={'multi-user' if system else 'default'}.target"]
    units = {SERVICE: service}
    for name, unit in SOCKETS.items():
        units[unit] = [
            "[Unit]",
            f"Description=Hutch: where {name}s reach hutchd",
            "",
            "[Socket]",
            f"ListenStream={runtime}/{name}.sock",
            f"FileDescriptorName={name}",
            f"Service={SERVICE}",
            f"SocketMode={'0666' if system else '0600'}",
            f"DirectoryMode={'0755' if system else '0700'}",
            "Backlog=1024",
            "",
            "[Install]",
            "WantedBy=sockets.target",
        ]
    if system:
        units |= _launcher(launcher, version)
    return {name: _sealed("\n".join(lines) + "\n", "# {}") for name, lines in units.items()}


_TOGETHER: Final = (
    "# Executors live on when hutchd is restarted, and are adopted by the next one; one that the kernel kills for",
    "# memory does not take hutchd along.",
    "KillMode=process",
    "OOMPolicy=continue",
    "# A cgroup tree of its own, in which each executor gets a cgroup that can be killed whole.",
    "Delegate=yes",
)
_APART: Final = (
    "# The broker lives on when hutchd is restarted, so that agents keep their models; the next hutchd takes it over.",
    "KillMode=process",
    "OOMPolicy=continue",
)


def _of_host(argv: Sequence[str], carried: Mapping[str, str], credential: str | None) -> list[str]:
    """Return where a host's hutchd may write, and what it may not do."""
    lines = [] if "HUTCH_STATE_DIR" in carried else ["StateDirectory=hutch", "StateDirectoryMode=0700"]
    if "HUTCH_CONFIG" not in carried:
        lines += ["ConfigurationDirectory=hutch"]
    places = [carried[name] for name in ("HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR") if name in carried]
    lines += [
        "# Shut in: executors and agents are no children of hutchd, but of hutch-launcher. It writes into its own",
        "# directories alone; for backups elsewhere: `systemctl edit hutchd`, [Service], ReadWritePaths=/backup. What",
        "# it writes to /tmp nobody else sees.",
        *([f"ReadWritePaths={' '.join(map(_quoted, places))}"] if places else []),
    ]
    used = [argv[0], *carried.values()]
    lines += [f"ProtectHome={'read-only' if _below(used, _HOMES) else 'yes'}"]
    lines += [] if _below(used, _TEMPORARY) else ["PrivateTmp=yes"]
    lines += _SHUT
    if credential is not None:
        return [
            *lines,
            "# The master key, sealed to this machine.",
            f"LoadCredentialEncrypted={_credential(credential)}",
        ]
    return [
        *lines,
        "# The master key, sealed to this machine: `hutch service install --system --credential FILE` sets this.",
        f"# LoadCredentialEncrypted={_credential('/etc/hutch/master-key.cred')}",
    ]


def _launcher(argv: Sequence[str], version: int) -> dict[str, list[str]]:
    """Return the units of hutch-launcher."""
    return {
        LAUNCHER: [
            "[Unit]",
            f"Description=Hutch: starts agents as the accounts that {LAUNCHER_CONFIG} names",
            "# A systemd before 254 cannot start it anew while executors have cgroups of version 2: then it tries on.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            _start(argv),
            f"Sockets={LAUNCHER_SOCKET}",
            "# Executors are its children and live on when it is restarted. Each has a cgroup of its own with its own",
            "# limits, so none holds for all of them together.",
            "KillMode=process",
            "OOMPolicy=continue",
            "Delegate=yes",
            *(["DelegateSubgroup=launcher"] if version >= _SUBGROUP else []),
            "TasksMax=infinity",
            "Restart=on-failure",
            "RestartSec=1",
            "# 2: its configuration or arguments cannot be used, which another start does not mend.",
            "RestartPreventExitStatus=2",
            "StateDirectory=hutch-launcher",
            "StateDirectoryMode=0711",
            "RuntimeDirectory=hutch-launcher",
            "RuntimeDirectoryMode=0755",
            "RuntimeDirectoryPreserve=yes",
            "LimitCORE=0",
            "LimitNOFILE=524288",
            "UMask=0077",
            "# What it needs to become another account, and no more; executors have none of it. There is no filter and",
            "# no private view of the host here: agents would inherit them.",
            f"CapabilityBoundingSet={_LAUNCHER_CAPS}",
            "NoNewPrivileges=yes",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ],
        LAUNCHER_SOCKET: [
            "[Unit]",
            "Description=Hutch: where hutchd, and nobody else, reaches hutch-launcher",
            "",
            "[Socket]",
            "ListenSequentialPacket=/run/hutch-launcher/launcher.sock",
            "FileDescriptorName=launcher",
            f"Service={LAUNCHER}",
            f"SocketUser={ACCOUNT}",
            "SocketMode=0600",
            "DirectoryMode=0755",
            "",
            "[Install]",
            "WantedBy=sockets.target",
        ],
    }


def templates() -> dict[str, str]:
    """Return the configuration of a host by its path: everything in it is a comment but the empty allow-list."""
    return {LAUNCHER_CONFIG: _LAUNCHER_TOML, "/etc/hutch/hutch.toml": _HUTCH_TOML}


_LAUNCHER_TOML: Final = """\
# Whose agents may run on this host. hutch-launcher, which alone can start them, reads this file each time it is asked
# and lets nothing else decide: neither hutchd nor its settings. Root's alone: owned by root, writable by nobody else.

# The account that hutchd runs as; it alone may ask.
serve = "hutch"

# Accounts, and groups whose members, may run agents. While both are empty, nobody may.
users = []
groups = []

# Never, whatever stands above: who is named here, uid 0, hutchd's account, and uids out of these bounds.
# deny = []
# uid_min = 1000
# uid_max = 60000

# Accounts that nobody but Hutch uses: what is left of them is swept away when their last session has ended.
# dedicated = []

# Seconds without hutchd after which all executors are ended.
# gone_after = 3600
"""
_HUTCH_TOML: Final = """\
# The settings of this host's hutchd (docs/operations.md). What is not set has its default; `hutchd --system --check`
# says whether they can be used, `systemctl reload hutchd` has them read again.

# Who sees and steers everybody's sessions, beside root:
# [admins]
# users = []
# groups = []

# The least that separates a session from others: "strict" also refuses sessions without a sandbox.
# [isolation]
# require = "account"

# What an agent reaches of the network: "full", "allow-list" or "broker-only".
# [sandbox]
# network = "full"

# Bounds of each session's processes, in bytes and in processes.
# [limits]
# memory = 8589934592
# pids = 4096
"""


def launchd(argv: Sequence[str], environ: Mapping[str, str], *, system: bool) -> dict[str, str]:
    """Return launchd's list likewise. It passes no sockets: hutchd makes its own."""
    carried = _carried(environ, system)

    def string(text: str) -> str:
        return f"<string>{escape(_plain(text), quote=False)}</string>"

    command = "".join(string(word) for word in [*argv, *(["--system"] if system else [])])
    variables = "".join(f"<key>{name}</key>{string(value)}" for name, value in carried.items())
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">',
        '<plist version="1.0">',
        "<dict>",
        f"  <key>Label</key>{string(LABEL)}",
        f"  <key>ProgramArguments</key><array>{command}</array>",
        *([f"  <key>EnvironmentVariables</key><dict>{variables}</dict>"] if variables else []),
        "  <key>RunAtLoad</key><true/>",
        "  <key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>",
        "  <!-- Executors live on when hutchd is restarted. -->",
        "  <key>AbandonProcessGroup</key><true/>",
        "  <key>Umask</key><integer>63</integer>",
        "  <key>HardResourceLimits</key><dict><key>Core</key><integer>0</integer></dict>",
        "</dict>",
        "</plist>",
    ]
    return {f"{LABEL}.plist": _sealed("\n".join(lines) + "\n", "<!-- {} -->")}


def seal_of(text: str) -> Literal["whole", "broken", "none"]:
    """Tell whether a text is as Hutch wrote it, whichever version did: else a person changed it, or wrote it."""
    found = _SEAL.fullmatch(text)
    if found is None:
        return "none"
    return "whole" if hashlib.sha256(found[1].encode()).hexdigest() == found[2] else "broken"


def _sealed(body: str, comment: str) -> str:
    seal = f"sealed by hutch: {hashlib.sha256(body.encode()).hexdigest()}"
    return f"{body}{comment.format(seal)}\n"


def _carried(environ: Mapping[str, str], system: bool) -> dict[str, str]:
    names = CARRIED if system else (*CARRIED, *CARRIED_OF_USER)
    carried = {name: environ[name] for name in names if environ.get(name)}
    for name, value in carried.items():
        if not value.startswith("/"):
            raise HutchError(Reason.INVALID_PARAMS, f"{name} must be an absolute path; it is {value!r}.")
    return carried


def _start(argv: Sequence[str]) -> str:
    words = [_quoted(argv[0]), *(_quoted(word).replace("$", "$$") for word in argv[1:])]
    return f"ExecStart={' '.join(words)}"


def _credential(path: str) -> str:
    if not path.startswith("/"):
        raise HutchError(Reason.INVALID_PARAMS, f"The credential must be an absolute path; it is {path!r}.")
    return f"hutch-master-key:{_specified(path)}"


def _below(paths: Sequence[str], places: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{place}/") for path in paths for place in places)


def _runtime(carried: Mapping[str, str], system: bool) -> str:
    """Return the directory of the sockets, as `paths.find_paths` finds it in the service, in systemd's spelling."""
    if given := carried.get("HUTCH_RUNTIME_DIR"):
        return _specified(given.rstrip("/"))
    if state := carried.get("HUTCH_STATE_DIR"):
        return _specified(state.rstrip("/") + "/run")
    return "/run/hutch" if system else "%t/hutch"


def _plain(text: str) -> str:
    if _CONTROL.search(text):
        raise HutchError(Reason.INVALID_PARAMS, f"No service can be made with {text!r}: it has a control character.")
    return text


def _specified(text: str) -> str:
    """Return a text for a setting that is taken whole: `%` begins a specifier."""
    return _plain(text).replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a text as one word of a setting that has many (systemd.syntax(7))."""
    return '"' + _specified(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
