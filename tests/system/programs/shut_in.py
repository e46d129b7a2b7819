"""Runs a program as systemd would run it by a unit's text: its account, its view of the host, its filters.

`shut_in.py UNIT ACCOUNT COMMAND…`, as root; the account of the unit is replaced. It knows the settings of hutchd's
unit, and refuses to run with any other. It uses the standard library and libseccomp only.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
EPERM, EAFNOSUPPORT = 1, 97
NE, EQ, MASKED = 1, 4, 7
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
NAMESPACES = 0x7E020000 | 0x80
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
ELSEWHERE = (
    "After",
    "Description",
    "Wants",
    "Type",
    "NotifyAccess",
    "User",
    "Group",
    "ExecStart",
    "ExecReload",
    "Sockets",
    "Environment",
    "KillMode",
    "OOMPolicy",
    "Restart",
    "RestartSec",
    "RestartPreventExitStatus",
    "TimeoutStartSec",
    "TimeoutStopSec",
    "WatchdogSec",
    "LimitNOFILE",
    "RuntimeDirectory",
    "RuntimeDirectoryMode",
    "RuntimeDirectoryPreserve",
    "StateDirectory",
    "StateDirectoryMode",
    "ConfigurationDirectory",
    "WantedBy",
    "PrivateMounts",
    "RemoveIPC",
    "SystemCallErrorNumber",
    "SystemCallArchitectures",
    "AmbientCapabilities",
    "UMask",
    "LimitCORE",
)
"""Settings that forbid nothing, or that the test applies itself."""


class Compare(ctypes.Structure):
    """struct scmp_arg_cmp: the argument that a rule compares."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Filter:
    """A filter of system calls, made with libseccomp."""

    def __init__(self, otherwise: int) -> None:
        self.lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self.lib.seccomp_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(self.lib.seccomp_init(ctypes.c_uint32(otherwise)))

    def add(self, action: int, name: str, *compares: tuple[int, int, int, int]) -> None:
        """Add an action for a system call; ignore a call that this machine lacks."""
        number = self.lib.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            return
        array = (Compare * max(1, len(compares)))(*(Compare(*one) for one in compares))
        code = self.lib.seccomp_rule_add_array(self.context, action, number, len(compares), array)
        assert code in (0, -17), f"{name}: {os.strerror(-code)}"  # 17: it exists already

    def load(self) -> None:
        """Apply the filter to this process and its children."""
        code = self.lib.seccomp_load(self.context)
        assert code == 0, os.strerror(-code)


def settings_of(text: str) -> dict[str, list[str]]:
    """Return the unit's settings, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def calls(words: Sequence[str]) -> Iterator[str]:
    """Yield the system calls of groups such as `@system-service`, as this systemd knows them."""
    for word in words:
        if not word.startswith("@"):
            yield word
            continue
        said = subprocess.run(["systemd-analyze", "syscall-filter", word], capture_output=True, text=True, check=True)
        lines = [re.sub("\x1b\\[[0-9;]*m", "", line).strip() for line in said.stdout.splitlines()[1:]]
        yield from calls([line for line in lines if line and not line.startswith("#")])


def mount(*words: str) -> None:
    """Mount in this process's own view of the host."""
    subprocess.run(["mount", *words], check=True)


def hide(given: dict[str, list[str]], account: pwd.struct_passwd) -> None:
    """Give this process the view of the host that the unit says, in a mount namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    mount("--make-rprivate", "/")
    writable = [path.strip('"') for path in " ".join(given.get("ReadWritePaths", [])).split()]
    for path in writable:
        mount("--bind", path, path)
    if given.get("PrivateTmp") == ["yes"]:
        for path in ("/tmp", "/var/tmp"):
            mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", path)
    if given.get("ProtectHome") == ["yes"]:
        for path in ("/home", "/root", "/run/user"):
            if os.path.isdir(path):
                mount("-t", "tmpfs", "-o", "mode=000,ro", "tmpfs", path)
    if given.get("ProtectKernelTunables") == ["yes"]:
        for path in ("/proc/sys", "/proc/irq", "/proc/bus", "/sys"):
            if os.path.isdir(path):
                mount("--bind", path, path)
                mount("-o", "remount,bind,ro", path)
    if given.get("ProtectKernelLogs") == ["yes"] and os.path.exists("/proc/kmsg"):
        mount("--bind", "/dev/null", "/proc/kmsg")
    if given.get("ProtectSystem") == ["strict"]:
        mount("-o", "remount,bind,ro", "/")


def filter_calls(given: dict[str, list[str]]) -> None:
    """Apply the unit's filters of system calls."""
    allowed: set[str] = set()
    for value in given.get("SystemCallFilter", []):
        names = set(calls(value.lstrip("~").split()))
        allowed = allowed - names if value.startswith("~") else allowed | names
    listed = Filter(ERRNO | EPERM)
    for name in allowed:
        listed.add(ALLOW, name)
    others = Filter(ALLOW)
    if given.get("MemoryDenyWriteExecute") == ["yes"]:
        others.add(ERRNO | EPERM, "mmap", (2, MASKED, 6, 6))
        others.add(ERRNO | EPERM, "mprotect", (2, MASKED, 4, 4))
        others.add(ERRNO | EPERM, "pkey_mprotect", (2, MASKED, 4, 4))
        others.add(ERRNO | EPERM, "shmat", (2, MASKED, 0o100000, 0o100000))
    if families := " ".join(given.get("RestrictAddressFamilies", [])).split():
        known = {FAMILIES[name] for name in families}
        for family in set(range(64)) - known:
            others.add(ERRNO | EAFNOSUPPORT, "socket", (0, EQ, family, 0))
    if given.get("RestrictNamespaces") == ["yes"]:
        others.add(ERRNO | EPERM, "setns")
        for bit in range(32):
            if NAMESPACES & 1 << bit:
                others.add(ERRNO | EPERM, "unshare", (0, MASKED, 1 << bit, 1 << bit))
                others.add(ERRNO | EPERM, "clone", (0, MASKED, 1 << bit, 1 << bit))
    if given.get("LockPersonality") == ["yes"]:
        others.add(ERRNO | EPERM, "personality", (0, NE, 0xFFFFFFFF, 0))
    if given.get("RestrictRealtime") == ["yes"]:
        others.add(ERRNO | EPERM, "sched_setscheduler")
    if given.get("RestrictSUIDSGID") == ["yes"]:
        for name, at in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2)):
            for bit in (0o4000, 0o2000):
                others.add(ERRNO | EPERM, name, (at, MASKED, bit, bit))
    others.load()
    listed.load()


def main() -> NoReturn:
    """Restrict itself, then exec."""
    unit, name, *command = sys.argv[1:]
    given = settings_of(Path(unit).read_text())
    known = (*ELSEWHERE, *HANDLED)
    assert not (strange := set(given) - set(known)), f"not known here: {strange}"
    account = pwd.getpwnam(name)
    hide(given, account)
    libc = ctypes.CDLL(None, use_errno=True)
    assert given["CapabilityBoundingSet"] == [""]
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.initgroups(name, account.pw_gid)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    assert given["NoNewPrivileges"] == ["yes"]
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    os.umask(0o077)
    assert grp.getgrgid(os.getgid()) is not None
    filter_calls(given)
    os.execv(command[0], command)


HANDLED = (
    *("ReadWritePaths", "PrivateTmp", "ProtectHome", "ProtectKernelTunables", "ProtectKernelLogs", "ProtectSystem"),
    *("SystemCallFilter", "MemoryDenyWriteExecute", "RestrictAddressFamilies", "RestrictNamespaces", "LockPersonality"),
    *("RestrictRealtime", "RestrictSUIDSGID", "CapabilityBoundingSet", "NoNewPrivileges"),
    # an account without capabilities could not do these anyway:
    *("PrivateDevices", "ProtectClock", "ProtectControlGroups", "ProtectHostname", "ProtectKernelModules"),
)

if __name__ == "__main__":
    main()
