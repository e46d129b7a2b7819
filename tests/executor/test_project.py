"""The project's policy file, and paths, as the account sees them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import anyio
import pytest

from hutch_executor.account.paths import PATHS_LIMIT, resolve_path, resolve_paths
from hutch_shared.project_file import TEXT_LIMIT, read_project_file


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / ".hutch").mkdir()
    return tmp_path / ".hutch" / "policy.toml"


def test_a_project_without_a_policy_file_has_no_policy(tmp_path: Path) -> None:
    """`read_project_file` returns None."""
    assert read_project_file(str(tmp_path)) is None


def test_the_file_comes_with_its_digest(tmp_path: Path, policy: Path) -> None:
    """Trust is bound to exactly this text."""
    policy.write_text("[permissions]\n# ü\n")

    found = read_project_file(str(tmp_path))

    assert found is not None
    assert (found.path, found.text) == (str(policy), "[permissions]\n# ü\n")
    assert found.digest == hashlib.sha256(policy.read_bytes()).hexdigest()


def unusable_large(policy: Path) -> None:
    policy.write_bytes(b"#" * (TEXT_LIMIT + 1))


def unusable_bytes(policy: Path) -> None:
    policy.write_bytes(b"\xff\xfe")


def unusable_link(policy: Path) -> None:
    policy.symlink_to("/etc/hostname")


def unusable_pipe(policy: Path) -> None:
    os.mkfifo(policy)


def unusable_directory(policy: Path) -> None:
    policy.mkdir()


@pytest.mark.parametrize(
    "make", [unusable_large, unusable_bytes, unusable_link, unusable_pipe, unusable_directory], ids=lambda f: f.__name__
)
def test_an_unusable_file_is_reported(tmp_path: Path, policy: Path, make: object) -> None:
    """The file can only tighten the rules, so the policy must report it: its text is the reason, which is not TOML."""
    make(policy)  # type: ignore[operator]

    found = read_project_file(str(tmp_path))

    assert found is not None
    assert found.text.startswith("!! This project's policy file cannot be used")


def test_a_link_instead_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    """A project's policy file must lie in the project."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "policy.toml").write_text("[permissions]\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / ".hutch").symlink_to(elsewhere)

    found = read_project_file(str(work))

    assert found is not None
    assert found.text.startswith("!!")


def test_links_and_dots_are_resolved(tmp_path: Path) -> None:
    """Rules judge the real path, also of a file that does not exist yet."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(real / "new")

    cwd = str(tmp_path)

    assert resolve_path("link/a/../b", cwd) == str(real / "b")
    assert resolve_path("dangling", cwd) == str(real / "new")
    assert resolve_path("/", cwd) == "/"


def test_unresolvable_paths_are_missing(tmp_path: Path) -> None:
    """Examples: a loop, a NUL, a path that is too long."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    (tmp_path / "bytes").symlink_to(os.fsdecode(b"\xff"))

    found = [resolve_path(path, str(tmp_path)) for path in ("loop", "loop/x", "a\0b", "x" * 5000, "bytes/a")]

    assert found == [None] * 5


async def test_the_number_of_paths_is_bounded(tmp_path: Path) -> None:
    """Paths past the limit are missing."""
    paths = tuple(f"p{n}" for n in range(PATHS_LIMIT + 5))

    found = await resolve_paths(paths, str(tmp_path), anyio.CapacityLimiter(1))

    assert len(found) == PATHS_LIMIT


async def test_paths_that_take_too_long_are_missing(tmp_path: Path) -> None:
    """A file server that does not answer delays the call up to its deadline, not the executor."""
    threads = anyio.CapacityLimiter(1)

    await threads.acquire_on_behalf_of(object())
    found = await resolve_paths(("a",), str(tmp_path), threads, deadline=0.01)

    assert found == {}
