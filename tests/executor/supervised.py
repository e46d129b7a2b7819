"""A process under a real filter whose calls a real `CallSupervisor` answers; tests tell it what to run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hutch_executor.sandbox import confine
from hutch_executor.sandbox.seccomp import assemble, native_abi, watch_rules
from hutch_executor.sandbox.supervisor import TRUNCATE, WATCHED, CallSupervisor

__all__ = ["Agent", "Supervised", "agent", "confined", "unsupervised"]

_PYTHON = """
import ctypes, errno, json, mmap, os, resource, stat, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
CWD, NOFOLLOW, EMPTY, SAME = -100, 0x100, 0x1000, 0xFFFFFFFF
NUMBERS = json.loads(sys.argv[1])

def call(name, *arguments):
    whole = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments]
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *whole)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "ok"

def run(text):
    try:
        try:
            code = compile(text, "test", "eval")
        except SyntaxError:
            exec(text, globals())
            return "ok"
        return eval(code, globals())
    except OSError as error:
        return errno.errorcode[error.errno]

print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
"""


class Agent:
    """A Python process; calling it runs a statement, or returns an expression's value, or an OSError's name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == "ready\n"

    def __call__(self, text: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(text) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


class Supervised(Agent):
    """An agent under the filter, and its supervisor."""

    def __init__(self, process: subprocess.Popen[str], supervisor: CallSupervisor) -> None:
        super().__init__(process)
        self.supervisor = supervisor


def _agent_argv() -> list[str]:
    abi = native_abi()
    assert abi is not None
    numbers = {name: abi.number(name) for name in (*WATCHED, *TRUNCATE) if abi.number(name) is not None}
    return [sys.executable, "-I", "-S", "-c", _PYTHON, json.dumps(numbers)]


@contextmanager
def confined(
    argv: Sequence[str | Path], watched: Iterable[str] = (*WATCHED, *TRUNCATE), **options: Any
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a program without capabilities, under a filter that watches these calls; yields it with the listener.

    The caller owns the listener. The process has ended afterwards.
    """
    abi = native_abi()
    if abi is None:
        pytest.skip("kernel: no table of system calls for this machine")
    ours, theirs = socket.socketpair()
    filter_ = assemble(watch_rules(watched), abi).hex()
    front = [sys.executable, "-I", "-S", confine.PROGRAM, "-", filter_, str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(
            [*front, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
            **options,
        )
        with process:
            try:
                theirs.close()
                _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
                assert len(descriptors) == 1, "the program passed no listener"
                yield process, descriptors[0]
            finally:
                process.kill()


@contextmanager
def agent(
    *places: Path, watched: Iterable[str] = (*WATCHED, *TRUNCATE), cwd: Path | None = None
) -> Iterator[Supervised]:
    """Start an agent that may write these places, in the first one."""
    with confined(_agent_argv(), watched, cwd=cwd or places[0]) as (process, listener):
        supervisor = CallSupervisor(listener, [str(place) for place in places])
        try:
            yield Supervised(process, supervisor)
        finally:
            process.kill()
            supervisor.close()


@contextmanager
def unsupervised(cwd: Path) -> Iterator[Agent]:
    """Start the same program without capabilities and without a filter: the kernel answers its calls."""
    abi = native_abi()
    assert abi is not None
    front = [sys.executable, "-I", "-S", confine.PROGRAM, "-", assemble((), abi).hex(), "-"]
    process = subprocess.Popen(
        [*front, *_agent_argv()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd
    )
    with process:
        try:
            yield Agent(process)
        finally:
            process.kill()


def descriptors() -> set[str]:
    """Return what this process has open."""
    return set(os.listdir("/proc/self/fd"))
