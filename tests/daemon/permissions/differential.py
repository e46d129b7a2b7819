"""Compares what the policy judged with what bash starts.

Lines are made at random; those that the policy allows are run by bash in an empty directory with stand-ins for all
programs. Each stand-in writes down its name and words. What was started must have been among what was judged.

    python tests/daemon/permissions/differential.py --accepted 100000 --seed 7
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_shared.messages import ToolCall
from tests.daemon.permissions.lines import PROGRAMS, plausible

ALLOWED = tuple(f"Bash({name}:*)" for name in PROGRAMS if name != "rm")
_STAND_IN = '#!/bin/sh\nr=${0##*/}\nfor w; do r="$r\x01$w"; done\nprintf "%s\x02" "$r" >>"$RECORD"\n'


@dataclass(frozen=True, slots=True)
class Accepted:
    line: str
    judged: frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Surprise:
    """A line that was allowed and in which bash started something that was not judged."""

    line: str
    started: tuple[str, ...]


def accepted_lines(random_: random.Random, workspace: str) -> Iterator[Accepted]:
    """Lines that the policy allows, without end."""
    layer = Layer("session", allow=(*ALLOWED, "Edit(**)"), base=workspace)
    policy = compile_policy([layer], home=workspace)
    number = 0
    while True:
        number += 1
        line = plausible(random_)
        call = ToolCall(call_id=str(number), action="run_command", agent_tool="Bash", input={}, command=line)
        real = {path: path for path in paths_to_resolve(call, workspace, workspace)}
        verdict = judge(policy, call, mode="ask", cwd=workspace, real=real, home=workspace, workspace=workspace)
        if verdict.decision == "allow":
            yield Accepted(line, frozenset(verdict.programs))


class Bash:
    """A bash that finds nothing but stand-ins."""

    def __init__(self, root: Path) -> None:
        self.shell = shutil.which("bash") or "/bin/bash"
        self.work = root / "work"
        self.work.mkdir()
        self.record = root / "record"
        self.bin = root / "bin"
        self.bin.mkdir()
        for name in PROGRAMS:
            path = self.bin / name
            path.write_text(_STAND_IN, encoding="utf-8")
            path.chmod(0o755)
        for name in ("timeout", "nice", "nohup", "stdbuf", "env"):
            real = shutil.which(name)
            if real:
                (self.bin / name).symlink_to(real)

    def started(self, line: str) -> list[tuple[str, ...]]:
        """Run the line; every program that bash started, with its words."""
        self.record.write_bytes(b"")
        shutil.rmtree(self.work)
        self.work.mkdir()
        for name in ("a", "b.txt", "bc", "in", "x", "status"):
            (self.work / name).write_bytes(b"")
        # What is left in the background holds the pipe open: its end says that all have ended.
        ours, theirs = os.pipe()
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 100)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            try:
                subprocess.run(
                    [self.shell, "--norc", "--noprofile", "-c", os.fsencode(line)],
                    cwd=self.work,
                    env={
                        "PATH": str(self.bin),
                        "RECORD": str(self.record),
                        "HOME": str(self.work),
                        "LC_ALL": "C.UTF-8",
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(high,),
                    timeout=60,
                    check=False,
                )
            finally:
                os.close(high)
            pipe.read()
        text = self.record.read_bytes().decode("utf-8", "surrogateescape")
        return [tuple(entry.split("\x01")) for entry in text.split("\x02") if entry]


def was_judged(started: tuple[str, ...], judged: frozenset[tuple[str, ...]], work: Path) -> bool:
    """Whether a start is one of the commands that were judged, at their end behind `timeout` and the like.

    Words that the shell expands to names of files (patterns, `~`) stand for any number of names.
    """
    for argv in judged:
        for at, word in enumerate(argv):
            if word == started[0] and _same(argv[at + 1 :], started[1:], work):
                return True
    return False


def _same(wanted: tuple[str, ...], given: tuple[str, ...], work: Path) -> bool:
    if not wanted:
        return not given
    word = wanted[0]
    if word == "~" or word.startswith("~/"):
        word = str(work) + word[1:]
    if given[:1] == (word,) and _same(wanted[1:], given[1:], work):
        return True
    if not any(char in word for char in "*?["):
        return False
    # Names of files that match, or the pattern itself; what is in the directory changes while the line runs.
    most = next((at for at, name in enumerate(given) if not fnmatch(name, word)), len(given))
    return any(_same(wanted[1:], given[taken:], work) for taken in range(1, most + 1))


def compare(accepted: int, seed: int) -> tuple[Surprise, ...]:
    """Run this many accepted lines; what was started without having been judged."""
    surprises: list[Surprise] = []
    with tempfile.TemporaryDirectory(prefix="hutch-differential-") as directory:
        bash = Bash(Path(directory).resolve())
        source = accepted_lines(random.Random(seed), str(bash.work))
        for _ in range(accepted):
            one = next(source)
            surprises += [
                Surprise(one.line, start)
                for start in bash.started(one.line)
                if not was_judged(start, one.judged, bash.work)
            ]
    return tuple(surprises)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--accepted", type=int, default=2_000, help="lines to run in bash")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = options.parse_args()
    print(f"seed {given.seed}")
    surprises = compare(given.accepted, given.seed)
    for surprise in surprises[:20]:
        print(f"{surprise.line!r} started {surprise.started!r}")
    print(f"{given.accepted} accepted lines, {len(surprises)} surprises")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
