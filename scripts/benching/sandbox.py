"""A start of the agent's CLI and one of its commands, in each sandbox and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

import anyio

from hutch_executor.runners.claude.launch import bundled_cli
from hutch_executor.runners.claude.shell import shell_variables
from hutch_executor.sandbox.command import SessionSandbox
from hutch_shared import messages as m
from scripts.benching.measure import Effort, Say, median

__all__ = ["bench"]

_KINDS: Final[tuple[m.SandboxKind, ...]] = ("bubblewrap", "landlock")
_COMMANDS: Final = 50
_TIMED: Final = """
import subprocess, sys, time
count, shell, prefix = int(sys.argv[1]), sys.argv[2], sys.argv[3]
began = time.perf_counter()
for _ in range(count):
    subprocess.run([shell, "-c", f"{prefix} :"], check=True)
print((time.perf_counter() - began) / count)
"""
"""Runs commands as the CLI does: the shell program, with the prefix program in it. Prints the seconds of each."""


async def bench(effort: Effort, say: Say) -> None:
    """Measure both, in turn; blocks."""
    await anyio.to_thread.run_sync(_bench, effort, say)


def _bench(effort: Effort, say: Say) -> None:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hutch-bench-")))
        bare = stack.enter_context(_place(root, None))
        for kind in _KINDS:
            inside = stack.enter_context(_place(root, kind))
            starts = [(inside.start(), bare.start()) for _ in range(4 * effort.rounds)]
            count = effort.of(_COMMANDS)
            commands = [(inside.commands(count), bare.commands(count)) for _ in range(effort.rounds)]
            for case, pairs in ((f"a start of the CLI in {kind}", starts), (f"a command in {kind}", commands)):
                ratio = median([ours / none for ours, none in pairs])
                ms, none_ms = (1e3 * median(times) for times in zip(*pairs, strict=True))
                say("sandbox", case, ratio, None, ms=ms, none_ms=none_ms)


class _Place:
    """A working directory in one sandbox, or in none."""

    def __init__(self, session: m.PrepareSession, sandbox: SessionSandbox | None) -> None:
        self._session = session
        self._sandbox = sandbox
        self._env = {"PATH": "/usr/bin:/bin", "HOME": session.home}
        self._env |= shell_variables(self._env, in_sandbox=sandbox is not None)

    def start(self) -> float:
        """Start the CLI, which prints its version; return the seconds with the making and the trial of the sandbox."""
        return self._timed([bundled_cli(), "--version"])[0]

    def commands(self, count: int) -> float:
        """Run commands one after the other in one sandbox, and return the seconds of each."""
        shell, prefix = self._env["CLAUDE_CODE_SHELL"], self._env["CLAUDE_CODE_SHELL_PREFIX"]
        return float(self._timed([os.path.realpath(sys.executable), "-c", _TIMED, str(count), shell, prefix])[1])

    def _timed(self, argv: Sequence[str]) -> tuple[float, str]:
        began = time.perf_counter()
        if self._sandbox is None:
            output = _run(argv, self._env, self._session.cwd)
        else:
            cli = os.path.dirname(bundled_cli())
            with closing(self._sandbox.wrap(argv, self._env, show=(cli,), sockets=(self._session.cwd,))) as inside:
                output = _run(inside.argv, inside.env, self._session.cwd, inside.descriptors)
        return time.perf_counter() - began, output


@contextmanager
def _place(root: Path, kind: m.SandboxKind | None) -> Iterator[_Place]:
    top = root / (kind or "none")
    for name in ("work", "home", "agents"):
        (top / name).mkdir(mode=0o700, parents=True)
    program = shutil.which("bwrap") or "" if kind == "bubblewrap" else ""
    spec = None if kind is None else m.SandboxSpec(program, kind=kind)
    session = m.PrepareSession(
        *("s-bench", "claude", str(top / "work"), "ask", m.AgentOptions(), m.Limits(), str(top / "spool")),
        str(top / "home"),
        sandbox=spec,
        agent_dir=str(top / "agents" / "s-bench"),
    )
    if spec is None:
        yield _Place(session, None)
    else:
        with closing(SessionSandbox(session, spec)) as sandbox:
            yield _Place(session, sandbox)


def _run(argv: Sequence[str], env: Mapping[str, str], cwd: str, inherited: Sequence[int] = ()) -> str:
    done = subprocess.run(
        argv,
        env=env,
        cwd=cwd,
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
