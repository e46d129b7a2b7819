"""The git directories that an agent gets when `.git` of its working directory is a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hutch_executor.sandbox.git_dirs import GitDirs, git_dirs
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_shared import messages as m
from tests.programs import bubblewrap


def git(cwd: Path, *words: str) -> None:
    """Run git with a neutral identity, without the machine's settings."""
    settings = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always")
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *settings, *words], cwd=cwd, env=env, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit, a worktree `../tree` and a submodule `sub`."""
    found = tmp_path.resolve() / "repository"
    library = found.with_name("library")
    for folder in (library, found):
        folder.mkdir()
        git(folder, "init", "-q")
        git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    git(found, "submodule", "add", "-q", str(library), "sub")
    git(found, "commit", "-q", "-m", "sub")
    git(found, "worktree", "add", "-q", "../tree")
    return found


def test_a_worktree_gets_the_folders_that_store_commits(repository: Path) -> None:
    """The agent can read the rest of the repository."""
    common = repository / ".git"
    own = (common / "worktrees" / "tree", common / "objects", common / "refs", common / "logs")

    assert git_dirs(str(repository.with_name("tree"))) == GitDirs((str(common),), tuple(map(str, own)))


def test_a_submodule_has_its_own_repository(repository: Path) -> None:
    """Its repository lies inside that of the surrounding project, which the agent does not see."""
    assert git_dirs(str(repository / "sub")) == GitDirs(write=(str(repository / ".git" / "modules" / "sub"),))


def test_a_plain_repository_needs_no_other_folder(repository: Path) -> None:
    """The same holds for a folder without a repository."""
    inside = repository.with_name("inside")
    inside.mkdir()
    git(inside, "init", "-q", "--separate-git-dir", "kept")

    assert git_dirs(str(repository)) == git_dirs(str(repository.parent)) == git_dirs(str(inside)) == GitDirs()


@pytest.mark.parametrize(
    "named", ["repository/.git", "repository/.git/worktrees/tree", "private", "nowhere", "", "forged"]
)
def test_a_folder_that_does_not_point_back_is_not_shown(repository: Path, named: str) -> None:
    """The agent can write the `.git` file, but cannot use it to see another folder of the account."""
    root = repository.parent
    for folder in ("folder", "private", "forged/worktrees", "folder/own"):
        (root / folder).mkdir(parents=True)
    (root / "folder" / ".git").write_text(f"gitdir: {root / named}\n")
    if named == "forged":  # an agent can write all these files in its working directory
        (root / "folder" / "own" / "gitdir").write_text(f"{root}/folder/.git\n")
        (root / "folder" / "own" / "commondir").write_text(f"{root}/private\n")
        (root / "forged" / "worktrees" / "own").symlink_to(root / "folder" / "own")
        (root / "folder" / ".git").write_text(f"gitdir: {root}/forged/worktrees/own\n")

    assert git_dirs(str(root / "folder")) == GitDirs()


def test_a_commit_in_a_worktree_arrives_and_nothing_that_others_run_is_changed(repository: Path) -> None:
    """In the sandbox the agent cannot change hooks, settings or the main checkout."""
    program, tree, common = bubblewrap(), repository.with_name("tree"), repository / ".git"
    home = repository.with_name("home")
    home.mkdir()
    found = git_dirs(str(tree))
    words = plan_sandbox(m.SandboxSpec(program), str(tree), str(home), show=found.show, write=found.write).argv()
    evil = f"for f in hooks/post-commit config commondir HEAD; do echo evil > {common}/$f; done; mv {common}/hooks x"
    commit = "echo two > file && git add file && git -c user.name=t -c user.email=t@t commit -q -m two"
    before = {path: path.read_bytes() for path in (common / "config", common / "HEAD")}
    done = subprocess.run(
        [*words, "/bin/sh", "-c", f"{commit} && git log -1 --format=%s; ls {repository}; {evil}"],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    logged = subprocess.run(
        ["git", "log", "--all", "--format=%s"], cwd=repository, capture_output=True, text=True, check=True
    )

    assert done.stdout == "two\n", done.stderr
    assert "two" in logged.stdout.split()
    assert {path: path.read_bytes() for path in before} == before
    assert not (common / "commondir").exists()
    assert not (common / "hooks" / "post-commit").exists()
