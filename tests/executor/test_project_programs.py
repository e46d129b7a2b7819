"""Programs that Hutch runs in a project, and a git that runs nothing of a repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from hutch_executor.sandbox.command import SessionSandbox
from hutch_executor.sandbox.project_programs import READING_GIT, git_reading, run_in_project
from hutch_shared import messages as m
from tests.executor.fake_hutchd import prepare
from tests.hostile_repository import HostileRepository
from tests.programs import bubblewrap, landlock_holds

pytestmark = pytest.mark.system

GIT = shutil.which("git") or "git"


@pytest.fixture
def hostile(tmp_path: Path) -> HostileRepository:
    return HostileRepository(tmp_path / "work", GIT)


def path_in(place: Path) -> str:
    """Return a PATH on which the project's own programs come first."""
    return f"{place}/bin:.::bin:{os.environ['PATH']}"


def reading(place: Path, **more: str) -> Mapping[str, str]:
    return {"HOME": str(place.parent), **git_reading(path_in(place), (str(place),)), **more}


async def read(place: Path, *arguments: str, **more: str) -> tuple[int, str]:
    output = bytearray()
    code = await run_in_project(None, ("git", *arguments), output.extend, cwd=str(place), env=reading(place, **more))
    return code, output.decode()


READS = [
    ("status", "--short"),
    ("--no-optional-locks", "status", "--short", "--ignore-submodules=none"),
    ("status", "-v", "-v"),
    ("diff",),
    ("diff", "--ext-diff", "--textconv", "--submodule=diff", "--ignore-submodules=none"),
    ("diff", "f.txt"),
    ("diff", "--ext-diff", "HEAD", "p.proc", "f.txt"),
    ("diff", "HEAD", "--", "f.txt"),
    ("log", "-p", "-n", "1", "HEAD", "--", "f.txt"),
    ("diff-files", "-p"),
    ("diff-index", "-p", "HEAD"),
    ("log", "-p", "--show-signature", "-n", "5", "--oneline"),
    ("log", "--format=%G?"),
    ("show", "--ext-diff", "HEAD"),
    ("blame", "f.txt"),
    ("cat-file", "--textconv", "HEAD:f.txt"),
    ("cat-file", "--filters", "HEAD:f.txt"),
    ("-c", "core.pager=x", "-c", "core.fsmonitor=.programs/fsmonitor", "status"),
    ("ls-files", "-m"),
    ("rev-parse", "HEAD"),
    ("branch", "--show-current"),
    ("config", "user.name"),
    ("config", "--local", "--includes", "-z", "--list"),
    ("remote", "get-url", "origin"),
    ("worktree", "list"),
    ("worktree", "add", "--no-track", "-B", "x", "../x", "HEAD"),
    ("--version",),
    ("-C", "sub", "status"),
    ("-C", "sub", "diff"),
    ("--git-dir=.git", "--work-tree=.", "status"),
]


@pytest.mark.parametrize("arguments", READS, ids=" ".join)
async def test_a_reading_git_runs_nothing_of_the_repository(hostile: HostileRepository, arguments: tuple[str]) -> None:
    """Hooks, filters, monitor, diffs, converters, pagers and submodules stay silent, and git answers."""
    hostile.ran()
    code, output = await read(hostile.place, *arguments)

    assert hostile.ran() == set()
    assert code == (1 if arguments[0] == "config" and len(arguments) == 2 else 0), output
    assert "hutch:" not in output


async def test_it_answers_like_git(hostile: HostileRepository) -> None:
    """It sees the changes of the working directory, without the changes inside submodules."""
    code, status = await read(hostile.place, "status", "--short")
    _, diff = await read(hostile.place, "diff", "--ext-diff", "--textconv", "HEAD", "f.txt")
    _, log = await read(hostile.place, "log", "--oneline")

    assert code == 0
    assert " M f.txt\n M p.proc\n M plain\n" in status
    assert "sub" not in status
    assert "-one\n+two\n" in diff
    assert log.endswith(" one\n")


def test_the_traps_of_the_repository_are_live(hostile: HostileRepository) -> None:
    """Plain git runs them all, so that their silence means something."""
    hostile.ran()
    hostile.plain("diff", "f.txt")
    hostile.plain("diff", "plain")
    hostile.plain("log", "-p", "-n", "1")
    hostile.plain("status", terminal=True)
    hostile.plain("--paginate", "log", "-n", "1", terminal=True)
    hostile.touch()
    hostile.plain("-c", "submodule.sub.ignore=none", "status")
    hostile.plain("fetch", "origin")
    hostile.plain("checkout", "-b", "other")
    hostile.plain("commit", "-a")
    ran = hostile.ran()

    expected = {
        "filter-clean",
        "filter-process",
        "diff-command",
        "diff-external",
        "textconv",
        "gpg",
        "fsmonitor",
        "pager",
        "pager-status",
    }
    expected |= {"sub-fsmonitor", "sub-clean", "ssh", "editor", "pre-commit", "reference-transaction"}
    expected |= {"post-index-change", "post-checkout"}
    assert ran >= expected, expected - ran


@pytest.mark.parametrize(
    "arguments",
    [
        ("commit", "-a"),
        ("checkout", "f.txt"),
        ("fetch",),
        ("alias-of-mine",),
        ("branch", "-m", "other"),
        ("config", "-e"),
        ("remote", "show", "origin"),
        ("worktree", "move", "x", "y"),
        ("--exec-path=.", "status"),
        ("--paginate", "status"),
        ("-c",),
        ("submodule", "status"),
        ("difftool",),
    ],
    ids=" ".join,
)
async def test_what_does_not_read_is_refused(hostile: HostileRepository, arguments: tuple[str]) -> None:
    """The exit code is git's own for fatal errors, and a sentence says that Hutch refused."""
    hostile.ran()
    code, output = await read(hostile.place, *arguments)

    assert code == 128
    assert output.startswith("hutch: git was not run: ")
    assert hostile.ran() == set()


@pytest.mark.parametrize("rules", ["", "path /usr/bin", "path \nend"])
def test_without_its_rules_it_does_not_run(tmp_path: Path, rules: str) -> None:
    """Missing or cut rules never mean fewer of them."""
    env = {"PATH": f"{READING_GIT}:{os.environ['PATH']}", "HUTCH_AGENT_GIT": rules}
    done = subprocess.run(["git", "status"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (128, "")
    assert done.stderr.startswith("hutch: git was not run: ")


async def test_a_driver_of_any_name_is_silent(hostile: HostileRepository) -> None:
    """The name of a driver is the repository's choice: blanks, quotes, patterns, dots, equal signs."""
    name = "a.b=c d$(x)*'\""
    config = hostile.place / ".git" / "config"
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    with config.open("a") as file:
        file.write(f'[filter "{quoted}"]\n\tclean = .programs/filter-clean\n\trequired = true\n')
    (hostile.place / ".git" / "info" / "attributes").write_text("*.txt filter=x\n")
    hostile.ran()
    settings = subprocess.run(
        ["git", "config", "--get-regexp", "^filter"],
        cwd=hostile.place,
        env=reading(hostile.place),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    last = [line for line in settings.splitlines() if line.startswith(f"filter.{name}.clean")][-1]

    assert last.rstrip() == f"filter.{name}.clean"


async def test_a_missing_object_is_not_fetched(hostile: HostileRepository) -> None:
    """A partial clone makes git fetch what it lacks, by a program that the remote's settings name."""
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "lazy",
        "remote.lazy.url": f"ext::{hostile.trap('fetched', ':')}",
        "remote.lazy.promisor": "true",
        "protocol.ext.allow": "always",
    }
    for key, value in settings.items():
        hostile.plain("config", key, value)
    blob = subprocess.run(
        [GIT, "rev-parse", "HEAD:f.txt"], cwd=hostile.place, capture_output=True, text=True, check=True
    ).stdout.strip()
    (hostile.place / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    hostile.ran()
    _, said = await read(hostile.place, "diff", "f.txt")
    silent = hostile.ran()
    hostile.plain("diff", "f.txt")

    assert silent == set()
    assert "unable to read" in said or "Could not" in said or "promisor" in said, said
    assert "fetched" in hostile.ran()


def test_every_rule_reaches_git(tmp_path: Path) -> None:
    """Each setting goes to git after the caller's own, and each variable is set or gone."""
    fake = tmp_path / "git"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; env\n')
    fake.chmod(0o755)
    rules = git_reading(f"{tmp_path}:/usr/bin:/bin", ())
    env = {**rules, "GIT_EXTERNAL_DIFF": "x", "GIT_CONFIG_COUNT": "0"}
    command = ["git", "-c", "core.pager=x", "status", "--ignore-submodules=none", "--", "--x"]
    said = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines = rules["HUTCH_AGENT_GIT"].splitlines()
    settings = [line.removeprefix("set ").replace(" ", "=", 1) for line in lines if line.startswith("set ")]
    variables = [line.removeprefix("env ").replace(" ", "=", 1) for line in lines if line.startswith("env ")]

    given = [after for word, after in pairwise(said) if word == "-c"]
    assert given == ["core.pager=x", *settings]
    assert said[said.index("status") :][:4] == ["status", "--ignore-submodules=all", "--", "--x"]
    assert set(variables) <= set(said)
    assert not any(word.startswith("GIT_EXTERNAL_DIFF") for word in said)


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
async def test_a_program_in_a_project_cannot_change_it(tmp_path: Path, kind: m.SandboxKind) -> None:
    """It sees the working directory and can write in it only if that was asked for."""
    program = bubblewrap() if kind == "bubblewrap" else ""
    if kind == "landlock" and not landlock_holds():
        pytest.skip("kernel: it has no Landlock")
    for name in ("work", "home", "agents"):
        (tmp_path / name).mkdir(mode=0o700)
    spec = m.SandboxSpec(program, kind=kind)
    session = msgspec.structs.replace(
        prepare(tmp_path / "work", sandbox=spec),
        home=str(tmp_path / "home"),
        agent_dir=str(tmp_path / "agents" / "s-1"),
    )
    (tmp_path / "work" / "file").write_text("seen\n")
    output = bytearray()
    with closing(SessionSandbox(session, spec)) as sandbox:
        codes = [
            await run_in_project(
                sandbox,
                ("/bin/sh", "-c", f"cat file; echo x > made-{read_only}"),
                output.extend,
                cwd=str(tmp_path / "work"),
                env={"PATH": "/usr/bin:/bin"},
                read_only=read_only,
            )
            for read_only in (True, False)
        ]

    assert [code != 0 for code in codes] == [True, False]
    assert output.decode().count("seen") == 2
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["file", "made-False"]
