"""What a seccomp filter decides, by an interpreter of its instructions and by the kernel."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from hutch_executor.sandbox.programs import confine_argv
from hutch_executor.sandbox.seccomp import (
    Abi,
    Rule,
    agent_rules,
    assemble,
    command_rules,
    landlock_rules,
    mode_rules,
    native_abi,
    table_abi,
    watch_rules,
)
from tests.programs import bubblewrap, required_program

MACHINES = ("x86_64", "aarch64")
CALLS = sorted(
    {rule.call for rule in (*agent_rules(), *landlock_rules(), *command_rules(), *mode_rules())}
    | {"chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown", "truncate"}
)
ONLY_ELSEWHERE = {
    "x86_64": {"socketcall", "ipc"},
    "aarch64": {"socketcall", "ipc", "chmod", "chown", "lchown", "open", "creat", "mknod"},
}
ALLOWED = "allowed"
ATTEMPTS = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
numbers = json.loads(sys.argv[1])

def call(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(numbers.get(name, name)), *map(ctypes.c_long, arguments))
    return errno.errorcode.get(ctypes.get_errno(), "allowed") if result < 0 else "allowed"

def opens(family, kind=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "allowed"

def pairs(kind):
    try:
        for one in socket.socketpair(type=kind):
            one.close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "allowed"

found = {
    "unix": opens(1), "inet": opens(2), "inet6": opens(10), "netlink": opens(16, socket.SOCK_RAW),
    "vsock": opens(40), "alg": opens(38, socket.SOCK_SEQPACKET), "packet": opens(17, socket.SOCK_RAW),
    "vsock, upper half set": call("socket", 40 | 1 << 32, 1, 0),
    "pair": pairs(socket.SOCK_STREAM), "pair of datagrams": pairs(socket.SOCK_DGRAM),
    "io_uring": call("io_uring_setup", 1, 0), "userfaultfd": call("userfaultfd", 1),
    "keyctl": call("keyctl", 0, 0xFFFFFFFD, 0), "add_key": call("add_key", 0, 0, 0, 0, 0),
    "request_key": call("request_key", 0, 0, 0, 0),
    "TIOCSTI": call("ioctl", 0, 0x5412, 0), "TIOCSTI, upper half set": call("ioctl", 0, 0x5412 | 1 << 32, 0),
    "TIOCLINUX": call("ioctl", 0, 0x541C, 0),
    "ptrace": call("ptrace", 0, 0, 0, 0), "setxattr": call("setxattr", 0, 0, 0, 0, 0),
    "x32": call(0x40000000 + 39),
}
print(json.dumps(found))
"""
IN_EVERY_SANDBOX = {
    "unix": ALLOWED,
    "inet": ALLOWED,
    "inet6": ALLOWED,
    "netlink": ALLOWED,
    "pair": ALLOWED,
    **dict.fromkeys(("vsock", "alg", "packet", "vsock, upper half set"), "EAFNOSUPPORT"),
    **dict.fromkeys(("userfaultfd", "keyctl", "add_key", "request_key"), "EPERM"),
    **dict.fromkeys(("TIOCSTI", "TIOCSTI, upper half set", "TIOCLINUX"), "EPERM"),
    "io_uring": "ENOSYS",
    "x32": "ENOSYS",
    "pair of datagrams": ALLOWED,
}


def decide(instructions: bytes, number: int, *arguments: int, arch: int) -> int:
    """Run the instructions as the kernel does, and return the action."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *(0,) * (6 - len(arguments))))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", instructions, 8 * at)
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(code)


def name_of(action: int) -> str:
    """Name an action: allowed, watched, or the error."""
    if action == 0x7FFF_0000:
        return ALLOWED
    return "watched" if action == 0x7FC0_0000 else errno.errorcode[action & 0xFFFF]


def abi_of(machine: str) -> Abi:
    found = table_abi(machine)
    assert found is not None
    return found


def judged(rules: Sequence[Rule], machine: str, call: str, *arguments: int) -> str:
    """Return what the rules' filter does with a call on that machine."""
    abi = abi_of(machine)
    number = abi.number(call)
    assert number is not None
    return name_of(decide(assemble(rules, abi), number, *arguments, arch=abi.arch))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_tables_agree_with_libseccomp(machine: str) -> None:
    """The own numbers are those of libseccomp, for each machine; a call that libseccomp lacks is newer than it."""
    library = ctypes.CDLL("libseccomp.so.2")
    abi = abi_of(machine)
    arch = ctypes.c_uint32(abi.arch)
    known = {call: library.seccomp_syscall_resolve_name_arch(arch, call.encode()) for call in CALLS}

    assert {call: abi.number(call) for call, number in known.items() if number >= 0} == {
        call: number for call, number in known.items() if number >= 0
    }
    assert {call for call in CALLS if abi.number(call) is None} == ONLY_ELSEWHERE[machine]


def test_this_machine_has_a_filter() -> None:
    """libseccomp gives the numbers here, and they are those of the table."""
    native = native_abi()
    assert native is not None
    table = next(abi for abi in map(abi_of, MACHINES) if abi.arch == native.arch)

    assert {call: native.number(call) for call in CALLS} == {call: table.number(call) for call in CALLS}
    assert native.has_x32 == table.has_x32


def without_libseccomp(*command: str) -> str:
    """Run a program of Python where libseccomp cannot be loaded; return its output."""
    ctypes.CDLL("libseccomp.so.2")
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libseccomp" in line)
    say = (
        "from hutch_executor.sandbox import seccomp as s; a = s.native_abi(); print(a and hex(a.arch), s.unavailable())"
    )
    hidden = [bubblewrap(), "--bind", "/", "/", "--dev", "/dev", "--ro-bind", "/dev/null", library]
    done = subprocess.run([*hidden, *command, sys.executable, "-c", say], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_without_libseccomp_the_table_serves_or_the_sandbox_says_so() -> None:
    """A machine with neither has no sandbox, and the sentence names what to install."""
    machine = os.uname().machine
    other = without_libseccomp(required_program("setarch"), "i686" if machine == "x86_64" else "linux32")

    assert without_libseccomp() == hex(abi_of(machine).arch)
    assert other.startswith("None libseccomp is not installed, and Hutch has no table of system calls for ")


@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_needed_socket_families_are_allowed(machine: str) -> None:
    """The kernel ignores the upper half of an argument, and so does the filter."""
    families = {family: judged(agent_rules(), machine, "socket", family) for family in range(64)}
    upper = [judged(agent_rules(), machine, "socket", family | 1 << 32) for family in (1, 40)]

    assert {family for family, outcome in families.items() if outcome == ALLOWED} == {1, 2, 10, 16}
    assert upper == [ALLOWED, "EAFNOSUPPORT"]


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_network_only_unix_sockets_are_left(machine: str) -> None:
    """`broker-only` under Landlock leaves the agent the way to its broker."""
    families = [
        family for family in range(64) if judged(agent_rules(network=False), machine, "socket", family) == ALLOWED
    ]

    assert families == [1]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_command_gets_no_unix_socket_but_connected_pairs(machine: str) -> None:
    """A datagram socket of a pair could send to any path, whatever flags come with its type; a raw one is the same."""
    nonblocking = 0o4000

    def outcome(call: str, *arguments: int) -> str:
        return judged((*agent_rules(), *command_rules()), machine, call, *arguments)

    assert (outcome("socket", 1, 1), outcome("socket", 2, 1)) == ("EPERM", ALLOWED)
    assert judged(command_rules(supervised=True), machine, "socket", 1, 1) == "watched"
    assert [outcome("socketpair", 1, kind) for kind in (1, 5, 1 | nonblocking)] == [ALLOWED] * 3
    assert [outcome("socketpair", 1, kind) for kind in (2, 2 | nonblocking, 3)] == ["EPERM"] * 3  # 3: SOCK_RAW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_process_sets_only_its_own_limits(machine: str) -> None:
    """A limit of no processor time would kill another process of the account."""
    outcomes = [judged(landlock_rules(), machine, "prlimit64", pid) for pid in (0, 1, 4711)]

    assert outcomes == [ALLOWED, "EPERM", "EPERM"]


@pytest.mark.parametrize("machine", MACHINES)
def test_no_file_becomes_set_user_id(machine: str) -> None:
    """Neither a new nor an existing one; a call that creates nothing may have anything in the mode's place."""
    created = os.O_CREAT | os.O_WRONLY

    def outcome(call: str, *arguments: int) -> str:
        return judged(mode_rules(), machine, call, *arguments)

    assert [outcome("fchmodat", 0, 0, mode) for mode in (0o4755, 0o6755, 0o2775, 0o755)] == ["EPERM"] * 2 + [
        ALLOWED
    ] * 2
    assert [outcome("openat", 0, 0, created, mode) for mode in (0o4755, 0o644)] == ["EPERM", ALLOWED]
    assert outcome("openat", 0, 0, os.O_RDONLY, 0o4755) == ALLOWED
    assert outcome("mknodat", 0, 0, 0o104755) == "EPERM"
    assert outcome("openat2") == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_other_calls_and_arguments_pass(machine: str) -> None:
    """The rule of one call does not touch the next."""
    rules = (*agent_rules(), *landlock_rules(), *command_rules(), *watch_rules(("fchmod",)))
    tcgets = 0x5401
    passed = [decide(assemble(rules, abi_of(machine)), number, arch=abi_of(machine).arch) for number in (0, 1, 39, 500)]

    assert {name_of(action) for action in passed if action} <= {ALLOWED, "ENOTSUP"}
    assert judged(rules, machine, "ioctl", 0, tcgets) == ALLOWED
    assert judged(rules, machine, "ioctl", 0, termios.TIOCSTI) == "EPERM"
    assert judged(rules, machine, "fchmod") == "watched"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_foreign_abi_is_refused(machine: str) -> None:
    """A number means another call there: i386, 32-bit ARM, and x32 numbers on x86-64."""
    abi = abi_of(machine)
    instructions = assemble(agent_rules(), abi)
    foreign = [name_of(decide(instructions, 39, arch=arch)) for arch in (0x4000_0003, 0x4000_0028, 0)]
    x32 = name_of(decide(instructions, 0x4000_0000 + 39, arch=abi.arch))

    assert foreign == ["ENOSYS"] * 3
    assert x32 == ("ENOSYS" if abi.has_x32 else ALLOWED)


def attempt(rules: Sequence[Rule]) -> dict[str, str]:
    """Attempt the calls in a process with the rules' filter; return the outcomes."""
    abi = native_abi()
    assert abi is not None
    numbers = json.dumps({call: number for call in CALLS if (number := abi.number(call)) is not None})
    argv = [*confine_argv(assemble(rules, abi)), sys.executable, "-c", ATTEMPTS, numbers]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_kernel_refuses_what_every_agents_filter_denies() -> None:
    """AF_VSOCK and others, io_uring, userfaultfd, keyrings, writing into a terminal, and x32 numbers are refused."""
    found = attempt(agent_rules())

    assert {name: found[name] for name in IN_EVERY_SANDBOX} == IN_EVERY_SANDBOX
    assert found["ptrace"] == ALLOWED  # debuggers work where processes are apart


def test_the_kernel_refuses_what_a_command_under_landlock_is_denied() -> None:
    """Beside that: Unix sockets, other processes' memory, extended attributes."""
    found = attempt((*agent_rules(), *landlock_rules(), *command_rules()))

    assert (found["unix"], found["pair"], found["pair of datagrams"]) == ("EPERM", ALLOWED, "EPERM")
    assert (found["ptrace"], found["setxattr"]) == ("EPERM", "ENOTSUP")
    assert found["inet"] == ALLOWED


def test_a_filter_that_the_kernel_refuses_runs_nothing() -> None:
    """The command does not run without its filter; the sentence says why."""
    no_return = struct.pack("=HBBI", 0x20, 0, 0, 0)
    done = subprocess.run([*confine_argv(no_return), "echo", "ran"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (126, "")
    assert "it cannot be confined: Invalid argument" in done.stderr
