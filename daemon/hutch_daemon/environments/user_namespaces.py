"""The kernel settings that close user namespaces to ordinary accounts, without which bubblewrap makes no sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["closed_by", "kernel_settings"]

_APPARMOR: Final = (
    "give bubblewrap a profile with `userns,` in it (/etc/apparmor.d/bwrap), or sysctl -w"
    " kernel.apparmor_restrict_unprivileged_userns=0"
)
_KERNEL: Final = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", _APPARMOR),
)


def kernel_settings() -> tuple[str, ...]:
    """Return the values of these settings now; empty where the kernel has no such setting. A few microseconds."""
    return tuple(_value(name) for name, _, _ in _KERNEL)


def closed_by(values: tuple[str, ...] | None = None) -> str:
    """Return a sentence with the setting that closes user namespaces and how to change it, or ""; by default of now."""
    for (name, closing, way), value in zip(_KERNEL, values or kernel_settings(), strict=True):
        if value == closing:
            return f"{name.replace('/', '.')} is {closing}, so accounts can make no user namespace: {way}"
    return ""


def _value(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""
