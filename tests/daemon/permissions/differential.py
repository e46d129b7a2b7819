"""Compares the commands that the policy judged with those that bash starts.

Lines are made at random. bash runs those that the policy allows, each in a directory of its own, with stand-ins for all
programs. Each stand-in writes down its name and words. Every started program must have been judged.

    python tests/daemon/permissions/differential.py --accepted 100000 --seed 7
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from hutch_daemon.permissions.layers import Layer, compile_policy
from hutch_daemon.permissions.policy import judge, paths_to_resolve
from hutch_shared.messages import ToolCall
from tests.daemon.permissions.lines import PROGRAMS, plausible

ALLOWED = tuple(f"Bash({name}:*)" for name in PROGRAMS if name != "rm")
_BATCH = 200
"""The number of lines that one bash runs."""
_STAND_IN = '#!/bin/sh\nr=${0##*/}\nfor w; do r="$r\x01$w"; done\nprintf "%s\x02" "$r" >>"$RECORD"\n'


@dataclass(frozen=True, slots=True)
class Accepted:
    line: str
    judged: frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Started:
    """The directory in which a line ran, and the programs that bash started for it."""

    work: Path
    programs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Surprise:
    """An allowed line for which bash started a program that was not judged."""

    line: str
    started: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    started: int
    surprises: tuple[Surprise, ...]


def accepted_lines(random_: random.Random, workspace: str) -> Iterator[Accepted]:
    """Yield allowed lines without end."""
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
    """A bash whose PATH has only stand-ins. Each line gets a subshell, a directory and a record of its own."""

    def __init__(self, root: Path) -> None:
        self.shell = shutil.which("bash") or "/bin/bash"
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        stand_in = root / "stand-in"
        stand_in.write_text(_STAND_IN, encoding="utf-8")
        stand_in.chmod(0o755)
        for name in PROGRAMS:
            (self.bin / name).hardlink_to(stand_in)
        for name in ("timeout", "nice", "nohup", "stdbuf", "env"):
            real = shutil.which(name)
            if real:
                (self.bin / name).symlink_to(real)

    def started(self, lines: Sequence[str]) -> list[Started]:
        """Run the lines; return for each the programs that bash started, with their words."""
        script: list[bytes] = []
        runs = Path(tempfile.mkdtemp(dir=self.root))
        works = [runs / f"w{number}" for number in range(len(lines))]
        for number, (line, work) in enumerate(zip(lines, works, strict=True)):
            work.mkdir()
            for name in ("a", "b.txt", "bc", "in", "x", "status"):
                (work / name).touch()
            quoted = shlex.quote(line).encode("utf-8", "surrogateescape")
            script.append(b"(cd %b; HOME=$PWD RECORD=%b/%d; eval %b)\n" % (bytes(work), bytes(runs), number, quoted))
        whole = runs / "lines"
        whole.write_bytes(b"".join(script))
        # Background processes hold the pipe open, so its end means that all have ended.
        ours, theirs = os.pipe()
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 100)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            try:
                subprocess.run(
                    [self.shell, "--norc", "--noprofile", whole],
                    env={"PATH": str(self.bin), "RECORD": str(runs / "none"), "HOME": "/", "LC_ALL": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(high,),
                    timeout=60 + len(lines),
                    check=False,
                )
            finally:
                os.close(high)
            pipe.read()
        found = [Started(work, self._read(runs / str(number))) for number, work in enumerate(works)]
        if self._read(runs / "none"):
            raise AssertionError("something was started outside the lines")
        shutil.rmtree(runs)
        return found

    @staticmethod
    def _read(record: Path) -> tuple[tuple[str, ...], ...]:
        try:
            text = record.read_bytes().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return ()
        return tuple(tuple(entry.split("\x01")) for entry in text.split("\x02") if entry)


def was_judged(started: tuple[str, ...], judged: frozenset[tuple[str, ...]], work: Path) -> bool:
    """Whether a started program is a judged command, or the end of one (`timeout` and similar programs come before it).

    Words that the shell expands to names of files (patterns, `~`) stand for any number of names, `$?` for a number.
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
    # Names of files that match, or the pattern itself; the files in the directory change while the line runs. Some of
    # the `$?` in a word may have been quoted.
    fits = re.compile(fnmatch.translate(word).replace(r"\$.", r"(?:\$.|[0-9]{1,3})")).match
    most = next((at for at, name in enumerate(given) if not fits(name)), len(given))
    return any(_same(wanted[1:], given[taken:], work) for taken in range(1, most + 1))


def compare(accepted: int, seed: int) -> Compared:
    """Run this number of accepted lines; return the number of started programs, and those that were not judged."""
    source = accepted_lines(random.Random(seed), "/nowhere/work")
    started = 0
    surprises: list[Surprise] = []
    with (
        tempfile.TemporaryDirectory(prefix="hutch-differential-", dir=_fast_directory()) as directory,
        ThreadPoolExecutor(1) as beside,
    ):
        bash = Bash(Path(directory).resolve())

        def look(batch: list[Accepted]) -> None:
            nonlocal started
            for one, found in zip(batch, bash.started([one.line for one in batch]), strict=True):
                started += len(found.programs)
                surprises.extend(
                    Surprise(one.line, start)
                    for start in found.programs
                    if not was_judged(start, one.judged, found.work)
                )

        # The next batch is created while bash runs this one.
        running: Future[None] | None = None
        wanted = islice(source, accepted)
        while batch := list(islice(wanted, _BATCH)):
            if running is not None:
                running.result()
            running = beside.submit(look, batch)
        if running is not None:
            running.result()
    return Compared(started, tuple(surprises))


def _fast_directory() -> str | None:
    """Return /dev/shm if it is usable, otherwise the directory for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--accepted", type=int, default=2_000, help="lines to run in bash")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = options.parse_args()
    print(f"seed {given.seed}")
    found = compare(given.accepted, given.seed)
    for surprise in found.surprises[:20]:
        print(f"{surprise.line!r} started {surprise.started!r}")
    print(f"{given.accepted} accepted lines, {found.started} programs started, {len(found.surprises)} surprises")
    return 1 if found.surprises else 0


if __name__ == "__main__":
    sys.exit(main())
