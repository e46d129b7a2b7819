"""The system calls of a sandbox: Landlock, seccomp, capabilities. Also a program that confines itself to run a command.

`python -I -S confine.py RULESET FILTER SUPERVISOR COMMAND…` confines itself and becomes COMMAND, found on PATH:

- RULESET: the inherited descriptor of a Landlock ruleset that `landlock` made, or `-`.
- FILTER: the instructions of a seccomp filter (see `seccomp`) in hexadecimal digits.
- SUPERVISOR: an inherited descriptor of a socket, which gets the listener for the filter's notifications, with the
  process id of the command; or `-`.

It drops every capability and forbids new privileges first: an agent of uid 0 has none in bubblewrap either. What it
confines can never be undone, and every child inherits it. If a step fails, the command does not run (exit code 126,
with a sentence). Then it examines itself: the kernel must report the filter, no new privileges and no capability.

It imports no module of Hutch and little of Python: it runs in front of each command, where an import is most of its
time. The numbers and structures are the kernel's: linux/landlock.h, linux/seccomp.h, linux/prctl.h, linux/capability.h.
The calls of Landlock, and from number 424 all, have the same number on every architecture; `syscall` of libc takes it.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = [
    "PROGRAM",
    "add_path",
    "checked",
    "drop_capabilities",
    "drop_privileges",
    "install_filter",
    "landlock_abi",
    "make_ruleset",
    "restrict",
]

PROGRAM = __file__

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_LANDLOCK_PATH = 1
_RULESET_SIZES = ((6, 24), (4, 16), (1, 8))
"""Bytes of `struct landlock_ruleset_attr` from an ABI on: files; TCP; scopes."""
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 24, 47, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SECCOMP_SET_MODE_FILTER, _SECCOMP_NEW_LISTENER = 1, 8
_SECCOMP_WAIT_KILLABLE = 32
"""From Linux 5.19 on, a call that the supervisor has received waits for its answer, whatever signal comes."""
_CAPABILITY_VERSION = 0x2008_0522
_CAPABILITIES = 64
_SECCOMP_CALLS = {"x86_64": 317, "aarch64": 277, "riscv64": 277, "loongarch64": 277, "ppc64le": 358, "s390x": 348}
_EINVAL = 22
_CANNOT_RUN = 126
_IGNORED = (13, 25)
"""SIGPIPE and SIGXFSZ."""
_SOL_SOCKET, _SCM_RIGHTS = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """Return the kernel's newest Landlock ABI; 0 if it has no Landlock, or it is off."""
    if sys.platform != "linux":
        return 0
    abi: int = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    return max(0, abi)


def make_ruleset(abi: int, files: int, tcp: int, scopes: int) -> int:
    """Return a descriptor of a Landlock ruleset that handles these rights: everything handled is denied without a rule.

    OSError if the kernel refuses. Rights and scopes are bits; those of a later ABI than `abi` are not passed on.
    """
    size = next(size for first, size in _RULESET_SIZES if abi >= first)
    attributes = (ctypes.c_uint64 * 3)(files, tcp, scopes)
    ruleset: int = checked(_libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0))
    return ruleset


def add_path(ruleset: int, path: int, rights: int) -> None:
    """Allow these rights for the file or the hierarchy that the descriptor `path` is open at. OSError."""
    rule = ctypes.create_string_buffer(rights.to_bytes(8, sys.byteorder) + path.to_bytes(4, sys.byteorder), 12)
    checked(_libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH, rule, 0))


def restrict(ruleset: int) -> None:
    """Confine this thread, and what it starts, to the ruleset. Needs `drop_privileges` first. OSError."""
    checked(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))


def drop_privileges() -> None:
    """Drop every capability and forbid new privileges, for this thread and what it starts. OSError."""
    checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # an unprivileged process may not; a capability that it does not have needs no bound
    drop_capabilities()


def drop_capabilities() -> None:
    """Drop this thread's capabilities; the process's other threads keep theirs. OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    checked(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def install_filter(instructions: bytes, *, supervised: bool = False) -> int | None:
    """Install a seccomp filter for this thread and what it starts; return the listener if it is supervised. OSError.

    A process can have one listener in all its filters.
    """

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    program = Program(len(instructions) // 8, instructions)
    if not supervised:
        checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))
        return None
    number = _SECCOMP_CALLS.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"the number of seccomp(2) on {os.uname().machine} is not known")
    for flags in (_SECCOMP_NEW_LISTENER | _SECCOMP_WAIT_KILLABLE, _SECCOMP_NEW_LISTENER):
        listener: int = _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program))
        if listener >= 0 or ctypes.get_errno() != _EINVAL:
            break
    checked(listener)
    return listener


def find_fault() -> str:
    """Return why this process is not confined as it should be, as the kernel reports it; empty if it is."""
    with open("/proc/self/status", "rb") as file:
        found = dict(line.split(b":\t", 1) for line in file.read().splitlines() if b":\t" in line)
    if found.get(b"NoNewPrivs", b"").strip() != b"1":
        return "it may gain privileges"
    if found.get(b"Seccomp", b"").strip() != b"2":
        return "no seccomp filter is in force"
    if int(found.get(b"CapEff", b"1"), 16) or int(found.get(b"CapPrm", b"1"), 16):
        return "it has capabilities"
    return ""


def main(arguments: list[str]) -> None:
    """Confine this process and become the command; see above."""
    ruleset, instructions, supervisor, *command = arguments
    if supervisor != "-":
        import _socket  # from a file that Landlock may not show
    try:
        drop_privileges()
        if ruleset != "-":
            restrict(int(ruleset))
            os.close(int(ruleset))
        listener = install_filter(bytes.fromhex(instructions), supervised=supervisor != "-")
        if listener is not None:
            connection = _socket.socket(fileno=int(supervisor))
            connection.sendmsg(
                [b"%d\n" % os.getpid()], [(_SOL_SOCKET, _SCM_RIGHTS, listener.to_bytes(4, sys.byteorder))]
            )
            connection.close()
            os.close(listener)
        fault = find_fault()
    except (OSError, ValueError) as error:
        fault = getattr(error, "strerror", None) or str(error)
    if fault:
        _refuse(f"it cannot be confined: {fault}")
    for signal in _IGNORED:  # by Python; the command must not inherit that
        _libc.signal(signal, None)
    try:
        os.execvp(command[0], command)  # noqa: S606 -- the command may well be a shell
    except OSError as error:
        _refuse(f"{command[0]} cannot be started: {error.strerror}")


def _refuse(why: str) -> None:
    sys.stderr.write(f"hutch: this command was not run: {why}.\n")
    sys.exit(_CANNOT_RUN)


def checked(result: int) -> int:
    """Return the result of a system call; OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
