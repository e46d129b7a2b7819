"""Fixtures of the client's tests: a fake hutchd, and an environment that names it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hutch_client.__main__ import main
from tests.client.fake_daemon import FakeDaemon

Hutch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings and variables of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith(("HUTCH_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> Iterator[FakeDaemon]:
    """A fake hutchd; HUTCH_HOST names it."""
    path = tmp_path / "client.sock"
    monkeypatch.setenv("HUTCH_HOST", str(path))
    with FakeDaemon(path).serving() as fake:
        yield fake


@pytest.fixture
def hutch(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> Hutch:
    """The command line in this process: returns exit code, standard output and standard error."""

    def command(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as refused:
            code = int(refused.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command
