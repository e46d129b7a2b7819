"""What a service manager is told about hutchd: systemd's units and launchd's list, as texts. The only place of them.

Pure. The last line of each text is a seal over the rest, so that a file that a person changed is told from one that an
earlier Hutch wrote: the first is theirs, the second may be replaced.

What the units leave out is left out on purpose, since executors and agents are children of hutchd and inherit it:
whatever changes what an agent sees or may do (PrivateTmp, ProtectHome, ProtectSystem, PrivateDevices), filters its
calls (MemoryDenyWriteExecute, LockPersonality, RestrictSUIDSGID, RestrictNamespaces), or takes away the sandbox around
it. The last does NoNewPrivileges where bubblewrap is set-uid, and all that mounts something over a part of /proc
(ProtectKernelLogs, ProtectKernelTunables, ProtectProc): the kernel then refuses bubblewrap a /proc of its own.
ProtectClock hides all devices but the plainest. In a user's manager filters that harm nobody bring NoNewPrivileges too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal
from xml.sax.saxutils import escape

from hutch_shared.errors import HutchError, Reason

__all__ = ["CARRIED", "CARRIED_OF_USER", "LABEL", "SERVICE", "SOCKETS", "launchd", "seal_of", "systemd"]

SERVICE: Final = "hutchd.service"
SOCKETS: Final = {"client": "hutchd.socket", "executor": "hutchd-executor.socket"}
"""The unit of each socket, by the name under which hutchd is passed it."""
LABEL: Final = "io.hutch.hutchd"
CARRIED: Final = ("HUTCH_CONFIG", "HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR")
CARRIED_OF_USER: Final = ("XDG_CONFIG_HOME", "XDG_STATE_HOME")
"""Variables that say where things are: the service gets them as the person has them; the second, a user's alone."""

_WATCHDOG: Final = 60
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_SEAL: Final = re.compile(r"(?s)(.*\n)(?:# |<!-- )sealed by hutch: ([0-9a-f]{64})(?: -->)?\n")
_DROPPED: Final = (
    "CAP_AUDIT_CONTROL CAP_AUDIT_READ CAP_BLOCK_SUSPEND CAP_MAC_ADMIN CAP_MAC_OVERRIDE CAP_SYSLOG CAP_SYS_BOOT"
    " CAP_SYS_MODULE CAP_SYS_PACCT CAP_SYS_RAWIO CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_WAKE_ALARM"
)


def systemd(argv: Sequence[str], environ: Mapping[str, str], *, system: bool) -> dict[str, str]:
    """Return the text of each unit by its file name; `argv` is hutchd, its program an absolute path.

    Of `environ` what is `CARRIED` counts. HutchError INVALID_PARAMS for a control character in any of it, which no
    unit could hold, and for a relative path.
    """
    carried = _carried(environ, system)
    runtime = _runtime(carried, system)
    usual = runtime in ("/run/hutch", "%t/hutch")
    command = [*argv, *(["--system"] if system else [])]
    service = [
        "[Unit]",
        "Description=Hutch: runs coding agents" + (" for the people of this host" if system else ""),
        *(["After=network-online.target", "Wants=network-online.target"] if system else []),
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join([_quoted(command[0]), *(_quoted(word).replace('$', '$$') for word in command[1:])])}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"Sockets={' '.join(SOCKETS.values())}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in carried.items()),
        "# Executors live on when hutchd is restarted, and are adopted by the next one; one that the kernel kills for",
        "# memory does not take hutchd along.",
        "KillMode=process",
        "OOMPolicy=continue",
        "# A cgroup tree of its own, in which each executor gets a cgroup that can be killed whole.",
        "Delegate=yes",
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
        if "HUTCH_STATE_DIR" not in carried:
            service += ["StateDirectory=hutch", "StateDirectoryMode=0700"]
        if "HUTCH_CONFIG" not in carried:
            service += ["ConfigurationDirectory=hutch"]
        service += [
            "# Nothing here needs the kernel's innards. What would also change what agents see or may do, or take away",
            "# the sandbox around them, is left out: they are children of hutchd.",
            f"CapabilityBoundingSet=~{_DROPPED}",
            "RestrictRealtime=yes",
            "# The master key, sealed to this machine:",
            "# systemd-creds encrypt --name=hutch-master-key - /etc/hutch/master-key.cred",
            "# LoadCredentialEncrypted=hutch-master-key:/etc/hutch/master-key.cred",
        ]
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
    return {name: _sealed("\n".join(lines) + "\n", "# {}") for name, lines in units.items()}


def launchd(argv: Sequence[str], environ: Mapping[str, str], *, system: bool) -> dict[str, str]:
    """Return launchd's list likewise. It passes no sockets: hutchd makes its own."""
    carried = _carried(environ, system)

    def string(text: str) -> str:
        return f"<string>{escape(_plain(text))}</string>"

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
