"""The files of Hutch's service, from the templates in `templates/`: units for systemd, a property list for launchd.

Pure, except that it reads the package's own templates. The last line of each file is a seal, a hash of the rest. The
seal distinguishes a file that somebody edited from one that an earlier Hutch wrote. Users' changes belong in drop-ins
(`hutchd.service.d/*.conf`), which Hutch never overwrites.

Theory. A setting of a unit applies to every process that the unit's process starts. So there are two kinds of units:

- The hutchd of a host starts only its broker; executors are children of hutch-launcher. Its unit is hardened as far as
  possible. Still open: the sockets, the network for the broker, and `/proc`, where hutchd looks at the processes of
  other accounts (so neither ProtectProc nor PrivateUsers). hutchd cannot start a sandbox under this unit and does not
  need to: sandboxes are probed where agents run.
- Executors and agents are children of a user's hutchd and of hutch-launcher. These units change nothing that an agent
  sees or may do (no PrivateTmp, ProtectHome, ProtectSystem, PrivateDevices), filter no system call (SystemCallFilter,
  MemoryDenyWriteExecute, LockPersonality, RestrictSUIDSGID, RestrictNamespaces), and leave the agent its sandbox: if
  something is mounted over a part of /proc (ProtectKernelLogs, ProtectKernelTunables, ProtectProc), the kernel refuses
  bubblewrap a /proc of its own. In a user's service manager any filter implies NoNewPrivileges, which disables a
  set-uid bubblewrap.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Final, Literal

from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import CLIENT_SOCKET_UNIT, DAEMON_UNIT, PLIST
from hutch_shared.paths import HOST_ACCOUNT, LAUNCHER_CONFIG, LAUNCHER_SOCKET_UNIT

__all__ = [
    "CREDENTIAL",
    "DAEMON",
    "EDITED",
    "LABEL",
    "LAUNCHER",
    "PLIST",
    "SOCKETS",
    "config_templates",
    "credential_of",
    "render_launchd",
    "render_systemd",
    "seal_of",
]

DAEMON: Final = DAEMON_UNIT
SOCKETS: Final = {"client": CLIENT_SOCKET_UNIT, "executor": "hutchd-executor.socket"}
"""The unit of each socket, by the name under which systemd passes the socket to hutchd."""
LAUNCHER: Final = "hutch-launcher.service"
CREDENTIAL: Final = f"{DAEMON}.d/master-key.conf"
"""The drop-in that loads the sealed master key."""
EDITED: Final = "50-edited.conf"
"""The name of the drop-in that keeps a user's edits of a unit of Hutch."""
LABEL: Final = PLIST.removesuffix(".plist")

_CARRIED: Final = ("HUTCH_CONFIG", "HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR")
_CARRIED_FOR_USER: Final = ("XDG_CONFIG_HOME", "XDG_STATE_HOME")
"""Variables that name Hutch's directories: the service gets them as they are set during the installation."""
_DELEGATE_SUBGROUP: Final = 254
"""The first systemd with DelegateSubgroup."""
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_PLACEHOLDER: Final = re.compile(r"@([A-Z_]+)@")
_SEAL: Final = re.compile(r"(?s)(.*\n)(?:# |<!-- )sealed by hutch: ([0-9a-f]{64})(?: -->)?\n")
_CREDENTIAL: Final = re.compile(r"^LoadCredentialEncrypted=hutch-master-key:(.+)$", re.MULTILINE)
_HOMES: Final = ("/home", "/root", "/run/user")
_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - compared with, not written to


def render_systemd(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    system: bool,
    launcher: Sequence[str] = (),
    credential: str | None = None,
    version: int = 0,
    account: str = HOST_ACCOUNT,
    group: str = HOST_ACCOUNT,
) -> dict[str, str]:
    """Return the text of each file, by its path below the folder of the units; `argv` starts hutchd.

    The programs are absolute paths. Of `environ` only Hutch's own variables are used. For a host: `launcher` starts
    hutch-launcher, `credential` is the file with the sealed master key, `version` the version of systemd (0: unknown),
    `account` and `group` those of hutchd. HutchError INVALID_PARAMS for a control character, which no unit can hold,
    and for a relative path.
    """
    carried = _carried(environ, system)
    runtime = _runtime(carried, system)
    values: dict[str, Sequence[str]] = {
        "HUTCHD": [_command([*argv, *(["--system"] if system else [])])],
        "ENVIRONMENT": [f"Environment={_quoted(f'{name}={value}')}" for name, value in carried.items()],
        "RUNTIME": [runtime],
        "RUNTIME_DIRECTORY": [],
    }
    if runtime in ("/run/hutch", "%t/hutch"):
        values["RUNTIME_DIRECTORY"] = [
            "RuntimeDirectory=hutch",
            f"RuntimeDirectoryMode={'0755' if system else '0700'}",
            "RuntimeDirectoryPreserve=yes",
        ]
    names = [DAEMON, *SOCKETS.values()]
    if system:
        names += [LAUNCHER, LAUNCHER_SOCKET_UNIT]
        values |= _host_directories(argv, carried)
        values["LAUNCHER"] = [_command(launcher)]
        values |= {"ACCOUNT": [_specified(account)], "GROUP": [_specified(group)]}
        values["DELEGATE_SUBGROUP"] = ["DelegateSubgroup=launcher"] if version >= _DELEGATE_SUBGROUP else []
    folder = f"systemd/{'system' if system else 'user'}"
    files = {name: _fill(f"{folder}/{name}", values) for name in names}
    if credential is not None:
        if not credential.startswith("/"):
            raise HutchError(
                Reason.INVALID_PARAMS, f"The credential must be an absolute path, and {credential!r} is not."
            )
        files[CREDENTIAL] = _fill(f"{folder}/master-key.conf", {"CREDENTIAL": [_specified(credential)]})
    return {name: _sealed(text, "# {}") for name, text in files.items()}


def _host_directories(argv: Sequence[str], carried: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Return the settings for the directories that the hardened hutchd of a host reads and writes."""
    writable = [carried[name] for name in ("HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR") if name in carried]
    used = [argv[0], *carried.values()]
    state = [] if "HUTCH_STATE_DIR" in carried else ["StateDirectory=hutch", "StateDirectoryMode=0700"]
    return {
        "STATE_DIRECTORY": state,
        "CONFIGURATION_DIRECTORY": [] if "HUTCH_CONFIG" in carried else ["ConfigurationDirectory=hutch"],
        "READ_WRITE_PATHS": [f"ReadWritePaths={' '.join(map(_quoted, writable))}"] if writable else [],
        "PROTECT_HOME": [f"ProtectHome={'read-only' if _is_below(used, _HOMES) else 'yes'}"],
        "PRIVATE_TMP": [] if _is_below(used, _TEMPORARY) else ["PrivateTmp=yes"],
    }


def render_launchd(argv: Sequence[str], environ: Mapping[str, str], *, system: bool) -> dict[str, str]:
    """Return the text of the property list, by its path. launchd passes no sockets: hutchd makes its own."""

    def string(text: str) -> str:
        return f"<string>{escape(_plain(text), quote=False)}</string>"

    variables = "".join(f"<key>{name}</key>{string(value)}" for name, value in _carried(environ, system).items())
    values = {
        "HUTCHD": ["".join(string(word) for word in [*argv, *(["--system"] if system else [])])],
        "ENVIRONMENT": [f"  <key>EnvironmentVariables</key><dict>{variables}</dict>"] if variables else [],
    }
    return {PLIST: _sealed(_fill(f"launchd/{PLIST}", values), "<!-- {} -->")}


def config_templates(account: str = HOST_ACCOUNT) -> dict[str, str]:
    """Return the configuration of a host by its path: comments, hutchd's `account`, and an empty allow-list."""
    launcher = _fill("etc/launcher.toml", {"ACCOUNT": [account]})
    return {LAUNCHER_CONFIG: launcher, "/etc/hutch/hutch.toml": _template("etc/hutch.toml")}


def seal_of(text: str) -> Literal["whole", "broken", "none"]:
    """Return `whole` for a text that Hutch wrote, `broken` if it was edited since, `none` for any other text."""
    found = _SEAL.fullmatch(text)
    if found is None:
        return "none"
    return "whole" if hashlib.sha256(found[1].encode()).hexdigest() == found[2] else "broken"


def credential_of(text: str) -> str | None:
    """Return the file from which a unit or drop-in loads the master key."""
    found = _CREDENTIAL.search(text)
    return found[1].replace("%%", "%") if found is not None else None


@cache
def _template(name: str) -> str:
    return resources.files("hutch_client.install").joinpath("templates", name).read_text(encoding="utf-8")


def _fill(name: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return a template with its placeholders filled. A line that is one placeholder becomes zero or more lines."""
    lines: list[str] = []
    for line in _template(name).splitlines():
        whole = _PLACEHOLDER.fullmatch(line)
        if whole is not None:
            lines += values[whole[1]]
        else:
            lines.append(_PLACEHOLDER.sub(lambda found: " ".join(values[found[1]]), line))
    return "\n".join(lines) + "\n"


def _sealed(body: str, comment: str) -> str:
    seal = f"sealed by hutch: {hashlib.sha256(body.encode()).hexdigest()}"
    return f"{body}{comment.format(seal)}\n"


def _carried(environ: Mapping[str, str], system: bool) -> dict[str, str]:
    names = _CARRIED if system else (*_CARRIED, *_CARRIED_FOR_USER)
    carried = {name: environ[name] for name in names if environ.get(name)}
    for name, value in carried.items():
        if not value.startswith("/"):
            raise HutchError(Reason.INVALID_PARAMS, f"{name} must be an absolute path, and {value!r} is not.")
    return carried


def _command(argv: Sequence[str]) -> str:
    return " ".join([_quoted(argv[0]), *(_quoted(word).replace("$", "$$") for word in argv[1:])])


def _is_below(paths: Sequence[str], folders: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for path in paths for folder in folders)


def _runtime(carried: Mapping[str, str], system: bool) -> str:
    """Return the directory of the sockets, as `paths.find_paths` finds it in the service, in systemd's spelling."""
    if runtime := carried.get("HUTCH_RUNTIME_DIR"):
        return _specified(runtime.rstrip("/"))
    if state := carried.get("HUTCH_STATE_DIR"):
        return _specified(state.rstrip("/") + "/run")
    return "/run/hutch" if system else "%t/hutch"


def _plain(text: str) -> str:
    if _CONTROL.search(text):
        raise HutchError(
            Reason.INVALID_PARAMS, f"A unit cannot hold {text!r}: it has a control character. Use another path."
        )
    return text


def _specified(text: str) -> str:
    """Return a text as the whole value of a setting. `%` is doubled, because it begins a specifier."""
    return _plain(text).replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a text as one word of a setting that takes several (systemd.syntax(7))."""
    return '"' + _specified(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
