"""What doctor says about each kind of sandbox."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.sandboxes import examine_sandboxes, try_as_caller
from hutch_daemon.settings import IsolationSettings, SandboxSettings, Settings
from hutch_shared import messages as m
from hutch_shared.paths import Paths, find_paths
from tests.programs import bubblewrap

AUTO = Settings()
BROKEN = {"full": "no permissions"}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """The paths of a hutchd that has no files yet."""
    return find_paths({"HUTCH_STATE_DIR": str(tmp_path / "state"), "HUTCH_RUNTIME_DIR": str(tmp_path / "run")})


def findings(
    paths: Paths,
    folder: Path,
    *,
    program: dict[str, str] | None = None,
    landlock: dict[str, str] | None = None,
    settings: Settings = AUTO,
    untried: str = "",
) -> list[Finding]:
    """Return the findings where the trials have these faults. Without `program`, bubblewrap is not installed."""
    if program is not None:
        (folder / "bwrap").write_text("#!/bin/sh\n")
        (folder / "bwrap").chmod(0o755)

    def try_sandbox(given: bytes) -> subprocess.CompletedProcess[bytes]:
        spec = msgspec.json.decode(given, type=m.SandboxSpec)
        trial = m.SandboxTrial((program if spec.kind == "bubblewrap" else landlock) or {}, 7)
        return subprocess.CompletedProcess((), 0, msgspec.json.encode(trial), b"")

    return list(examine_sandboxes(settings, paths, "ann", try_sandbox, path=str(folder), untried=untried))


def test_both_kinds_are_tried(paths: Paths, tmp_path: Path) -> None:
    """A network that does not work is named."""
    first, second = findings(paths, tmp_path, program={}, landlock={"allow-list": "no proxy"})

    assert first == Finding(f"sandbox by bubblewrap: {tmp_path}/bwrap works, tried as ann")
    assert second == Finding(
        'sandbox by Landlock: ABI 7 works, tried as ann; not with [sandbox] network = "allow-list": no proxy'
    )


def test_without_bubblewrap_doctor_says_what_it_would_add_and_how_to_install_it(paths: Paths, tmp_path: Path) -> None:
    """That is no problem while Landlock holds."""
    first, second = findings(paths, tmp_path)

    assert (first.advice, second.advice) == (None, None)
    assert "bubblewrap (bwrap) is not installed: " in first.subject
    assert "It would add processes of the session's own" in first.subject
    assert "the level strict" in first.subject


@pytest.mark.parametrize(
    "settings",
    [
        Settings(isolation=IsolationSettings(require="strict")),
        Settings(sandbox=SandboxSettings(mode="require")),
        Settings(sandbox=SandboxSettings(kind="bubblewrap")),
        Settings(sandbox=SandboxSettings(network="allow-list")),
    ],
    ids=["strict", "require", "kind", "allow-list"],
)
def test_settings_that_need_bubblewrap_make_it_a_problem(paths: Paths, tmp_path: Path, settings: Settings) -> None:
    """Sessions are refused without it."""
    assert [one.advice is None for one in findings(paths, tmp_path, settings=settings)] == [False, True]
    assert [one.advice is None for one in findings(paths, tmp_path, program={}, settings=settings)] == [True, True]


def test_a_host_with_neither_has_two_problems(paths: Paths, tmp_path: Path) -> None:
    """The reason of each is named, and what to do."""
    first, second = findings(paths, tmp_path, program=BROKEN, landlock={"full": "the kernel has none"})

    assert first.advice is not None
    assert f"{tmp_path}/bwrap does not work as ann (no permissions): " in first.advice
    assert second.advice is not None
    assert "the kernel has none" in second.advice
    assert "Linux 5.13" in second.advice


def test_landlock_is_not_missed_where_bubblewrap_works(paths: Paths, tmp_path: Path) -> None:
    """An old kernel is no problem then."""
    assert [one.advice for one in findings(paths, tmp_path, program={}, landlock=BROKEN)] == [None, None]


def test_a_bubblewrap_that_cannot_be_tried_is_only_looked_at(paths: Paths, tmp_path: Path) -> None:
    """Only root can try it as another account."""
    (first, _) = findings(paths, tmp_path, program=BROKEN, untried="not tried: only root can")

    assert first.advice is None
    assert first.subject.endswith("/bwrap is installed; not tried: only root can") or "user namespace" in first.subject


def test_without_a_sandbox_nothing_is_tried(paths: Paths, tmp_path: Path) -> None:
    """The settings say so."""
    (only,) = findings(paths, tmp_path, settings=Settings(sandbox=SandboxSettings(mode="off")))

    assert (only.advice, "off" in only.subject) == (None, True)


def test_a_trial_that_fails_to_run_is_a_fault(paths: Paths, tmp_path: Path) -> None:
    """Its last words are the reason."""

    def fail(_: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess((), 1, b"", b"Traceback\nImportError: no such module\n")

    def hang(_: bytes) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired("python", 1)

    (tmp_path / "bwrap").touch(mode=0o755)
    for run, why in ((fail, "ImportError: no such module"), (hang, "timed out")):
        found = list(examine_sandboxes(AUTO, paths, "ann", run, path=str(tmp_path)))
        assert [one.advice is not None and why in one.advice for one in found] == [True, True]


@pytest.mark.system
def test_the_callers_own_sandboxes_are_really_tried(paths: Paths) -> None:
    """By the executor's program."""
    program = bubblewrap()
    first, *_ = examine_sandboxes(AUTO, paths, "me", try_as_caller)

    assert first == Finding(f"sandbox by bubblewrap: {program} works, tried as me")
