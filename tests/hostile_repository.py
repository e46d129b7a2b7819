"""A git repository whose settings name a program at every place where git runs one. Each leaves a mark when it runs."""

from __future__ import annotations

import os
import pty
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["HostileRepository"]

_IDENTITY: Final = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgSign=false")
_HOOKS: Final = ("post-index-change", "pre-commit", "post-commit", "reference-transaction", "post-checkout")

_FILTER: Final = r"""
import sys
def take():
    while (size := int(sys.stdin.buffer.read(4) or b"0", 16)):
        sys.stdin.buffer.read(size - 4)
def give(*lines):
    for line in lines:
        sys.stdout.buffer.write(b"%04x%s" % (len(line) + 4, line))
    sys.stdout.buffer.write(b"0000")
    sys.stdout.buffer.flush()
take()
give(b"git-filter-server\n", b"version=2\n")
take()
give()
sys.stdin.buffer.read()
"""
"""A filter process by the protocol of gitattributes(5), without any capability."""


class HostileRepository:
    """A repository in `place`; its programs and the marks that they leave are in folders of it."""

    def __init__(self, place: Path, git: str) -> None:
        """Make it. `git` is the git of the machine."""
        self.place = place
        self.marks = place / ".marks"
        self.git = git
        self._programs = place / ".programs"
        for folder in (self.marks, self._programs, place / "bin", place / ".hooks"):
            folder.mkdir(parents=True, exist_ok=True)
        self._fill()

    def ran(self) -> set[str]:
        """Return the names of the programs that ran, and forget them."""
        found = set()
        for mark in self.marks.iterdir():
            found.add(mark.name)
            mark.unlink()
        return found

    def plain(self, *arguments: str, terminal: bool = False) -> None:
        """Run plain git in it, on a terminal if `terminal`; its outcome does not matter."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.place.parent), "GIT_CONFIG_NOSYSTEM": "1", "TERM": "dumb"}
        command = [self.git, *_IDENTITY, *arguments]
        if not terminal:
            subprocess.run(command, cwd=self.place, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            return
        ours, theirs = pty.openpty()
        try:
            subprocess.run(command, cwd=self.place, env=env, stdin=theirs, stdout=theirs, stderr=theirs, check=False)
        finally:
            os.close(ours)
            os.close(theirs)

    def touch(self) -> None:
        """Change the files, so that git must look at their content."""
        for name in ("f.txt", "p.proc", "plain", "sub/s.txt"):
            (self.place / name).write_text("two\n")

    def trap(self, name: str, then: str = "cat", folder: Path | None = None) -> Path:
        """Write a program that leaves the mark `name` and then does something harmless."""
        path = (folder or self._programs) / name
        path.write_text(f"#!/bin/sh\n: > {shlex.quote(str(self.marks / path.name))}\n{then}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        return path

    def _run(self, *arguments: str, cwd: Path | None = None) -> str:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.place.parent), "GIT_CONFIG_NOSYSTEM": "1"}
        command = [self.git, *_IDENTITY, "-c", "protocol.file.allow=always", *arguments]
        return subprocess.run(
            command, cwd=cwd or self.place, env=env, capture_output=True, check=True, text=True
        ).stdout

    def _fill(self) -> None:
        self._run("init", "-q", "-b", "main")
        inner = self.place.parent / f"{self.place.name}-inner"
        inner.mkdir()
        self._run("init", "-q", "-b", "main", cwd=inner)
        (inner / "s.txt").write_text("one\n")
        self._run("add", ".", cwd=inner)
        self._run("commit", "-qm", "one", cwd=inner)
        self._run("submodule", "-q", "add", str(inner), "sub")
        (self.place / ".gitignore").write_text(".marks\n.programs\n")
        (self.place / ".gitattributes").write_text("*.txt filter=evil diff=evil merge=evil\n*.proc filter=process\n")
        for name in ("f.txt", "p.proc", "plain"):
            (self.place / name).write_text("one\n")
        self._run("config", "-f", ".gitmodules", "submodule.sub.ignore", "none")
        self._run("add", ".")
        self._run("commit", "-qm", "one")
        self._sign()
        self._set(self.place, {"submodule.sub.ignore": "none", "core.worktree": str(self.place)})
        included = {
            "filter.evil.clean": self.trap("filter-clean"),
            "filter.evil.smudge": self.trap("filter-smudge"),
            "filter.evil.required": "true",
            "filter.process.process": self.trap("filter-process", f"exec {sys.executable} -c {shlex.quote(_FILTER)}"),
            "diff.external": self.trap("diff-external", ":"),
            "diff.evil.command": self.trap("diff-command", ":"),
            "diff.evil.textconv": self.trap("textconv", 'cat "$1"'),
            "merge.evil.driver": self.trap("merge-driver", ":"),
            "log.showSignature": "true",
            "gpg.program": self.trap("gpg", "exit 1"),
            "status.submoduleSummary": "true",
            "diff.submodule": "diff",
        }
        conditional = {
            "core.fsmonitor": self.trap("fsmonitor", "exit 1"),
            "core.hooksPath": ".hooks",
            "core.pager": self.trap("pager"),
            "pager.status": self.trap("pager-status"),
            "core.editor": self.trap("editor", ":"),
            "core.sshCommand": self.trap("ssh", "exit 1"),
            "credential.helper": self.trap("credential", ":"),
            "alias.status": f"!{self.trap('alias', ':')}",
            "remote.origin.url": "ssh://nowhere.invalid/x",
        }
        for name, settings in ((".included", included), (".conditional", conditional)):
            for key, value in settings.items():
                self._run("config", "-f", name, key, str(value))
        self._set(self.place, {"include.path": "../.included", "includeIf.gitdir/i:**/.git.path": "../.conditional"})
        self._set(
            self.place / "sub",
            {
                "core.fsmonitor": str(self.trap("sub-fsmonitor", "exit 1")),
                "filter.sub.clean": str(self.trap("sub-clean")),
                "filter.sub.required": "true",
            },
        )
        (self.place / "sub" / ".gitattributes").write_text("*.txt filter=sub\n")
        for hook in _HOOKS:
            self.trap(hook, ":", self.place / ".hooks")
        for folder in (self.place, self.place / "bin"):
            for name in ("git", "cat", "false", "setpriv", "choom", "printenv"):
                self.trap(name, ":", folder)
        self.touch()

    def _sign(self) -> None:
        """Give the commit a signature, so that git asks gpg for it."""
        commit = self._run("cat-file", "commit", "HEAD")
        head, _, message = commit.partition("\n\n")
        signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
        file = self._programs / "commit"
        file.write_text(f"{head}\n{signature}\n\n{message}")
        name = self._run("hash-object", "-t", "commit", "-w", str(file)).strip()
        self._run("update-ref", "HEAD", name)

    def _set(self, repository: Path, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            self._run("config", key, value, cwd=repository)
