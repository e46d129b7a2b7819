"""Turns a user's edits of a unit of Hutch into a drop-in, which keeps them after the unit is replaced.

Pure. The drop-in gets each setting of the edited unit that the new unit lacks or gives another value. It switches off
each setting that the user removed, if a drop-in can do that; `lost` names the other ones. Edits of `ExecStart`, the
sockets, the account and Hutch's own variables are lost and named too: their old values would keep the old program in
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from hutch_client.install.units import credential_of

__all__ = ["Edits", "edits_of"]

Settings = dict[tuple[str, str], list[str]]
"""The values of each setting, in order, by section and name."""

_FOLLOWS: Final = frozenset(
    {"ExecStart", "Sockets", "User", "Group", "Type", "NotifyAccess", "Service", "ListenStream", "FileDescriptorName"}
    | {"ListenSequentialPacket", "SocketUser", "Description"}
)
_OFF: Final = {"yes": "no", "strict": "no", "read-only": "no"}
"""Maps the value of a switch to the value that switches it off."""
_EMPTY_RESETS: Final = frozenset(
    {"ReadWritePaths", "RestrictAddressFamilies", "RestartPreventExitStatus", "SystemCallArchitectures"}
    | {"SystemCallFilter"}
)
"""Lists that an empty value resets to their default."""
_ONLY_GROW: Final = frozenset({"After", "Before", "Wants", "Requires", "Environment"})
"""Lists that a drop-in adds to: an empty value does not reset them, or would reset Hutch's own values too."""
_RESETS: Final = {"CapabilityBoundingSet": "~"}


class Edits(NamedTuple):
    """A user's changes to a unit."""

    drop_in: str
    """The text of the drop-in; empty if nothing needs one."""
    lost: tuple[str, ...]
    """Edits that the drop-in cannot or must not keep: `Name=value`, or `Name` for a removed setting."""


def edits_of(edited: str, new: str) -> Edits:
    """Compare an edited unit with the text that replaces it."""
    before, after = _settings(edited), _settings(new)
    kept: dict[str, list[str]] = {}
    lost: list[str] = []
    for (section, name), values in before.items():
        ours = after.get((section, name), [])
        if values == ours or section == "Install":
            continue
        if name in _ONLY_GROW:
            added = [f"{name}={value}" for value in values if value not in ours and not _is_carried(name, value)]
            kept.setdefault(section, []).extend(added)
        elif name in _FOLLOWS:
            lost += [f"{name}={value}" for value in values if value not in ours]
        elif all(credential_of(f"{name}={value}") for value in values):
            continue  # the master key has a drop-in of its own
        else:
            reset = [f"{name}="] if len(values) > 1 or len(ours) > 1 or name in _EMPTY_RESETS else []
            kept.setdefault(section, []).extend([*reset, *(f"{name}={value}" for value in values)])
    for (section, name), values in after.items():
        if (section, name) in before or section == "Install" or name in _FOLLOWS | {"Environment"}:
            continue
        if name in _EMPTY_RESETS or name in _RESETS:
            kept.setdefault(section, []).append(f"{name}={_RESETS.get(name, '')}")
        elif values[-1] in _OFF:
            kept.setdefault(section, []).append(f"{name}={_OFF[values[-1]]}")
        else:
            lost.append(name)
    return Edits(_text(kept), tuple(lost))


def _is_carried(name: str, value: str) -> bool:
    """Return whether a value is a variable that the installation sets itself."""
    carried = ("HUTCH_CONFIG=", "HUTCH_STATE_DIR=", "HUTCH_RUNTIME_DIR=", "XDG_")
    return name == "Environment" and value.strip('"').startswith(carried)


def _settings(text: str) -> Settings:
    """Read a unit (systemd.syntax(7)): sections, settings over several lines with a backslash, comments."""
    settings: Settings = {}
    section = pending = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("#", ";")) or (not stripped and not pending):
            continue
        pending += stripped
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        whole, pending = pending, ""
        if whole.startswith("[") and whole.endswith("]"):
            section = whole[1:-1]
            continue
        name, equals, value = whole.partition("=")
        if equals:
            settings.setdefault((section, name.strip()), []).append(value.strip())
    return settings


def _text(kept: Mapping[str, list[str]]) -> str:
    sections = [f"[{section}]\n" + "".join(f"{line}\n" for line in lines) for section, lines in kept.items() if lines]
    if not sections:
        return ""
    return "# Yours: your edits of the unit itself, from before Hutch replaced it.\n" + "\n".join(sections)
