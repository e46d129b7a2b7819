"""What is not UTF-8: an argument, a variable, a directory or the input of any command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hutch_client.commands import MODULES, Parser
from tests.client.conftest import Hutch
from tests.client.fake_daemon import FakeDaemon

BAD = os.fsdecode(b"caf\xe9")


def _verbs(parser: argparse.ArgumentParser) -> list[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Return the parser's verbs with their parsers; without verbs itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [((name, *rest), leaf) for name, child in action.choices.items() for rest, leaf in _verbs(child)]
    return [((), parser)]


def _lines() -> list[tuple[str, ...]]:
    """Return command lines in which every argument and every option of every command is once not UTF-8."""
    lines: list[tuple[str, ...]] = [("help", BAD), (BAD,)]
    for command, module in MODULES.items():
        parser = Parser(prog=command)
        importlib.import_module(f"hutch_client.commands.{module}").COMMANDS[command].arguments(parser)
        for verbs, leaf in _verbs(parser):
            for action in leaf._actions:
                if action.option_strings:
                    lines += [(command, *verbs, name, BAD) for name in action.option_strings]
                    lines += [(command, *verbs, f"{name}={BAD}") for name in action.option_strings if name[:2] == "--"]
                else:
                    lines.append((command, *verbs, BAD))
    return lines


def test_no_argument_of_any_command_may_be_other_than_utf8(hutch: Hutch) -> None:
    """One line says which one, and the exit code is 2."""
    lines = _lines()

    assert len(lines) > 200
    for line in lines:
        code, out, err = hutch(*line)
        assert (code, out, err.count("\n")) == (2, "", 1), line
        assert r"caf\xe9" in err, line


@pytest.mark.parametrize("name", ["HOME", "HUTCH_HOST", "HUTCH_STATE_DIR", "XDG_RUNTIME_DIR", "EDITOR", "HUTCH_\udce9"])
@pytest.mark.parametrize("command", sorted(MODULES))
def test_no_variable_that_is_read_may_be_other_than_utf8(
    hutch: Hutch, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    """One line says which one, and the exit code is 2."""
    monkeypatch.setenv(name, BAD)

    code, out, err = hutch(command)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"hutch: The variable {name[:4]}")


def test_other_variables_do_not_matter(daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have any others."""
    monkeypatch.setenv("LESS_TERMCAP", BAD)

    assert hutch("help")[0] == 0


@pytest.mark.parametrize(
    "line",
    [
        ("run", "hi"),
        ("run", "-C", "sub", "hi"),
        ("run", "--script", "script.jsonl", "hi"),
        ("policy", "show", "-C", "."),
        ("policy", "trust", "."),
        ("daemon", "backup", "copy.db"),
        ("ps",),
        ("inspect", "fix"),
    ],
    ids=" ".join,
)
def test_a_directory_that_is_not_utf8_costs_one_line(
    hutch: Hutch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    """A command that needs the directory ends with exit code 2; the others do not mind."""
    place = tmp_path / BAD
    (place / "sub").mkdir(parents=True)
    monkeypatch.chdir(place)

    code, _, err = hutch(*line)

    if line[0] not in ("ps", "inspect"):
        assert (code, err.count("\n")) == (2, 1), err
        assert r"caf\xe9" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("line", [("key", "add", "anthropic"), ("policy", "test", "-")], ids=" ".join)
def test_input_that_is_not_utf8_costs_one_line(
    hutch: Hutch, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    """A key or a file of cases is not guessed; a prompt gets U+FFFD instead."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))

    code, _, err = hutch(*line)

    assert (code, err.count("\n")) == (2, 1), err


@pytest.mark.parametrize(
    ("words", "variables"),
    [((BAD,), {}), (("--config", BAD), {}), ((), {"HUTCH_STATE_DIR": f"/tmp/{BAD}"}), (("--check",), {"HOME": BAD})],
    ids=["word", "option", "state", "home"],
)
def test_hutchd_refuses_what_is_not_utf8(words: tuple[str, ...], variables: dict[str, str]) -> None:
    """One line says what, and the exit code is 2."""
    done = subprocess.run(
        [sys.executable, "-m", "hutch_daemon", *words],
        env={"PATH": os.defpath, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert r"caf\xe9" in done.stderr
