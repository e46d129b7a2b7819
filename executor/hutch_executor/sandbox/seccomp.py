"""Seccomp filters: which system calls an agent's processes may make. Builds the instructions; installs nothing.

Theory. A filter sees the number of a system call and its arguments, but no memory: it can judge a socket's family, not
a path. A number means a call only within one ABI, so a filter first checks the ABI and refuses every other one (a
32-bit program on x86-64, x32 numbers). The kernel takes the arguments judged here as 32-bit values and ignores their
upper halves, so only the lower halves count. The first rule of a call decides; a call without a rule is allowed.

The numbers come from libseccomp if it is there, which knows every architecture; otherwise from the tables below, for
x86-64 and arm64. Calls that are newer than the installed libseccomp have the same number everywhere. Numbers and
constants: the kernel's asm/unistd.h, linux/socket.h, linux/seccomp.h and linux/audit.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

__all__ = [
    "Abi",
    "Rule",
    "agent_rules",
    "assemble",
    "command_rules",
    "file_rules",
    "landlock_rules",
    "mode_rules",
    "native_abi",
    "table_abi",
    "unavailable",
    "watch_rules",
]


class Abi(NamedTuple):
    """A system call ABI: the kernel's name for it (`AUDIT_ARCH_*`), and the number of each call that it has."""

    arch: int
    number: Callable[[str], int | None]
    """Returns a call's number; None if the ABI has no such call."""
    has_x32: bool = False
    """Numbers from 2^30 are of another ABI with the same name."""


class Rule(NamedTuple):
    """What happens to a call: always, or if a 32-bit argument, under a mask, has (or has not) one of some values."""

    call: str
    action: int
    argument: int | None = None
    values: Sequence[int] = ()
    mask: int = 0xFFFF_FFFF
    otherwise: bool = False
    """The rule applies if the argument has none of the values."""


_ALLOW: Final = 0x7FFF_0000
_ERRNO: Final = 0x0005_0000
_NOTIFY: Final = 0x7FC0_0000
_X86_64: Final = 0xC000_003E
_ARM64: Final = 0xC000_00B7
_X32: Final = 0x4000_0000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 5, 0xF
_TIOCLINUX: Final = 0x541C
"""Pastes into a virtual console; like TIOCSTI it writes into a terminal as if its user had typed."""
_CHANGING: Final = (0x4008_6602, 0x4008_7602, 0x401C_5820, 0x4080_6685, 0x800C_6613)
"""FS_IOC_SETFLAGS, _SETVERSION, _FSSETXATTR, _ENABLE_VERITY, _SET_ENCRYPTION_POLICY: a file's owner may change these by
a descriptor that only reads."""
_SET_USER_ID: Final = (stat.S_ISUID,)
_SET_ID: Final = (stat.S_ISUID, stat.S_ISGID, stat.S_ISUID | stat.S_ISGID)
_CHMOD: Final = (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2))
"""The calls that change a mode, and which argument it is."""
_SHARED_MEMORY: Final = (
    *("ipc", "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink"),
)
"""System V memory, semaphores and queues, and POSIX queues: each process of the account can reach all of them by name.
`ipc` does the same on some architectures."""
_CREATES: Final = os.O_CREAT | 0o20000000
"""O_CREAT, O_TMPFILE: the call has a mode."""
_OPEN: Final = (("open", 1), ("openat", 2))
"""The calls that open a file, and which argument is their flags; the mode comes next."""

_COMMON: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "openat2": 437,
    "pidfd_getfd": 438,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "file_setattr": 469,
}
"""Calls that came after the numbers were made the same on every architecture."""
_ON_X86_64: Final = {
    "open": 2,
    "ioctl": 16,
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "socket": 41,
    "socketpair": 53,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "truncate": 76,
    "creat": 85,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "mknod": 133,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "semtimedop": 220,
    "mq_open": 240,
    "mq_unlink": 241,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "openat": 257,
    "mknodat": 259,
    "fchownat": 260,
    "fchmodat": 268,
    "prlimit64": 302,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "userfaultfd": 323,
}
_ON_ARM64: Final = {
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "ioctl": 29,
    "mknodat": 33,
    "truncate": 45,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "openat": 56,
    "ptrace": 117,
    "mq_open": 180,
    "mq_unlink": 181,
    "msgget": 186,
    "msgctl": 187,
    "msgrcv": 188,
    "msgsnd": 189,
    "semget": 190,
    "semctl": 191,
    "semtimedop": 192,
    "semop": 193,
    "shmget": 194,
    "shmctl": 195,
    "shmat": 196,
    "socket": 198,
    "socketpair": 199,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "prlimit64": 261,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "userfaultfd": 282,
}
_TABLES: Final = {
    "x86_64": Abi(_X86_64, {**_ON_X86_64, **_COMMON}.get, has_x32=True),
    "aarch64": Abi(_ARM64, {**_ON_ARM64, **_COMMON}.get),
}

_LD, _JEQ, _JGE, _AND, _RET = 0x20, 0x15, 0x35, 0x54, 0x06
"""The instructions that are used: load a word of the call, compare and jump, mask, return. See linux/bpf_common.h."""
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
"""Where `struct seccomp_data` holds the call's number, its ABI and its arguments, each of which has 8 bytes."""


@cache
def native_abi() -> Abi | None:
    """Return the ABI of this process; None if this platform has neither libseccomp nor a table. Blocks at first."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    return _of_libseccomp() or _TABLES.get(os.uname().machine)


def unavailable() -> str:
    """Return a sentence if no filter can be built here; empty if one can."""
    if native_abi() is not None:
        return ""
    return f"libseccomp is not installed, and Hutch has no table of system calls for {os.uname().machine}"


def table_abi(machine: str) -> Abi | None:
    """Return the ABI of Hutch's own table for a machine, as uname(2) names it."""
    return _TABLES.get(machine)


def agent_rules(*, network: bool = True) -> tuple[Rule, ...]:
    """Return the rules for every agent, whatever its sandbox; without `network` it gets no IP socket either.

    `socketcall` makes sockets on some architectures, with arguments in memory; they all have `socket` too.
    """
    families = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK) if network else (_AF_UNIX,)
    return (
        Rule("socket", _deny(errno.EAFNOSUPPORT), 0, families, otherwise=True),
        Rule("socketpair", _deny(errno.EAFNOSUPPORT), 0, (_AF_UNIX,), otherwise=True),
        *_deny_all(errno.ENOSYS, "socketcall", "io_uring_setup", "io_uring_enter", "io_uring_register"),
        *_deny_all(errno.EPERM, "userfaultfd", "add_key", "request_key", "keyctl"),
        Rule("ioctl", _deny(errno.EPERM), 1, (termios.TIOCSTI, _TIOCLINUX)),
    )


def landlock_rules() -> tuple[Rule, ...]:
    """Return the rules for what Landlock does not cover.

    An agent's commands share their Landlock domain with its CLI, which may use Unix sockets as they may not: nothing
    inside may control or look into another process. A POSIX ACL is an extended attribute. A limit of no processor time
    would kill any process of the account, so a process sets its own limits only.
    """
    return (
        *_deny_all(errno.ENOSYS, *_SHARED_MEMORY),
        Rule("prlimit64", _deny(errno.EPERM), 0, (0,), otherwise=True),
        *_deny_all(errno.EPERM, "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "file_setattr"),
        *_deny_all(errno.EOPNOTSUPP, "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
        *_deny_all(errno.EOPNOTSUPP, "removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
    )


def command_rules(*, supervised: bool = False) -> tuple[Rule, ...]:
    """Return the rules for a command under Landlock: it opens no Unix socket.

    If it is `supervised`, the supervisor decides for each process. A pair of connected sockets is allowed, except one
    of datagrams, which can send to any socket by its path. The kernel makes a pair of datagram sockets of `SOCK_RAW`
    too.
    """
    return (
        Rule("socket", _NOTIFY if supervised else _deny(errno.EPERM), 0, (_AF_UNIX,)),
        Rule(
            *("socketpair", _deny(errno.EPERM), 1, (_SOCK_STREAM, _SOCK_SEQPACKET)),
            mask=_SOCK_TYPE_MASK,
            otherwise=True,
        ),
    )


def mode_rules() -> tuple[Rule, ...]:
    """Return the rules in bubblewrap: no file becomes set-user-id. Outside, it would run as the account.

    Set-group-id stays possible, since it is usual on shared folders.
    """
    return (*_creating(_SET_USER_ID), *(_deny_modes(call, mode, _SET_USER_ID) for call, mode in _CHMOD))


def file_rules(*, truncates: bool) -> tuple[Rule, ...]:
    """Return the rules for what opening and creating files can do that Landlock does not cover.

    No new file is set-user-id or set-group-id: its owner's rights would leave the sandbox with it. No descriptor that
    only reads changes a file; nor, with `truncates`, does opening one: O_TRUNC alone needs no right before ABI 3.
    """
    cuts = (os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE)
    return (
        Rule("ioctl", _deny(errno.EOPNOTSUPP), 1, _CHANGING),
        *(
            Rule(call, _deny(errno.EACCES), flags, cuts, mask=os.O_TRUNC | os.O_ACCMODE)
            for call, flags in _OPEN
            if truncates
        ),
        *_creating(_SET_ID),
    )


def watch_rules(calls: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules that send these calls to a supervisor, which performs or refuses each."""
    return tuple(Rule(call, _NOTIFY) for call in calls)


def assemble(rules: Iterable[Rule], abi: Abi) -> bytes:
    """Return the filter as an array of `struct sock_filter`. Calls that the ABI does not have need no rule."""
    code = [(_LD, 0, 0, _ARCH_AT), (_JEQ, 1, 0, abi.arch), (_RET, 0, 0, _deny(errno.ENOSYS))]
    code.append((_LD, 0, 0, _NUMBER_AT))
    if abi.has_x32:
        code += [(_JGE, 0, 1, _X32), (_RET, 0, 0, _deny(errno.ENOSYS))]
    for rule in rules:
        if (number := abi.number(rule.call)) is not None:
            body = _judge(rule)
            code += [(_JEQ, 0, len(body), number), *body]
    code.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _judge(rule: Rule) -> list[tuple[int, int, int, int]]:
    """Return the instructions for a call with the rule's number. If the rule does not apply, the next one is judged."""
    if rule.argument is None:
        return [(_RET, 0, 0, rule.action)]
    lower_half = 0 if sys.byteorder == "little" else 4
    body = [(_LD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument + lower_half), (_AND, 0, 0, rule.mask)]
    count = len(rule.values)
    for at, value in enumerate(rule.values):
        left = count - at - 1  # comparisons to skip; after them come the action and the load for the next rule
        if rule.otherwise:
            body.append((_JEQ, left + 1, 0, value))
        else:
            body.append((_JEQ, left, 0 if left else 1, value))
    return [*body, (_RET, 0, 0, rule.action), (_LD, 0, 0, _NUMBER_AT)]


def _deny(number: int) -> int:
    return _ERRNO | number


def _creating(bits: Sequence[int]) -> tuple[Rule, ...]:
    """Return the rules that refuse these bits of a new file's mode. Later rules for opening calls do not count.

    The arguments of `openat2` are in memory: programs take its absence for an older kernel. A call that creates nothing
    has no mode, so its argument is ignored.
    """
    return (
        Rule("openat2", _deny(errno.ENOSYS)),
        *(_deny_modes(call, mode, bits) for call, mode in (("creat", 1), ("mknod", 1), ("mknodat", 2))),
        *(Rule(call, _ALLOW, flags, (0,), mask=_CREATES) for call, flags in _OPEN),
        *(_deny_modes(call, flags + 1, bits) for call, flags in _OPEN),
    )


def _deny_modes(call: str, mode: int, bits: Sequence[int]) -> Rule:
    mask = 0
    for bit in bits:
        mask |= bit
    return Rule(call, _deny(errno.EPERM), mode, bits, mask=mask)


def _deny_all(number: int, *calls: str) -> tuple[Rule, ...]:
    return tuple(Rule(call, _deny(number)) for call in calls)


def _of_libseccomp() -> Abi | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
        library.seccomp_arch_native.restype = ctypes.c_uint32
        arch = int(library.seccomp_arch_native())
        resolve = library.seccomp_syscall_resolve_name
    except (OSError, AttributeError):
        return None

    def number(call: str) -> int | None:
        found = int(resolve(call.encode()))  # negative: unknown, or only on another architecture
        return found if found >= 0 else _COMMON.get(call)

    return Abi(arch, number, has_x32=arch == _X86_64)
