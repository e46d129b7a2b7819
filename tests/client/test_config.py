from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hutch_client import starting
from hutch_client.__main__ import main
from tests.preloaded import PRELOADED

TEXT = """\
[permissions]
expiry = 600.0
notify = ["say", "a \\"b\\" \\u009b2J \\u007f\\n"]

[accounts.map]
ann = "alice"
"b.c" = "x"

[turns]
timeout = inf
"""

HUTCHD = starting.HUTCHD
"""The programs that the client itself starts."""

Config = Callable[..., tuple[int, str, str]]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> Path:
    """A settings file that HUTCH_CONFIG names. No hutchd runs."""
    path = tmp_path / "my hutch.toml"
    path.write_text(TEXT)
    monkeypatch.setenv("HUTCH_CONFIG", str(path))
    return path


@pytest.fixture
def config(settings: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """`hutch config` in this process: returns exit code, standard output and standard error."""
    monkeypatch.setattr(starting, "HUTCHD", PRELOADED.argv("hutchd"))

    def command(*words: str) -> tuple[int, str, str]:
        try:
            code = main(("config", *words))
        except SystemExit as refused:
            code = int(refused.code or 0)
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return command


def test_all_settings_are_shown_as_a_valid_file(config: Config, settings: Path) -> None:
    """The output is TOML that hutchd accepts and shows unchanged, without control characters."""
    code, out, err = config("show")
    settings.write_text(out)

    assert (code, err) == (0, "")
    assert out.startswith(f"# {settings}\n# No setting holds a secret")
    assert "\x9b" not in out
    assert tomllib.loads(out)["permissions"]["notify"] == tomllib.loads(TEXT)["permissions"]["notify"]
    assert config("check") == (0, f"{settings}: the settings can be used\n", "")
    assert config("show")[1] == out


def test_each_setting_has_its_origin(config: Config, settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin is the file with the line, even for a default value; or the variable; or the default."""
    monkeypatch.setenv("HUTCH_LOG_LEVEL", "debug")

    lines = {line.partition(" ")[0]: line for line in config("show", "--origin")[1].splitlines()}

    assert lines["expiry"].endswith(f"  # {settings}:2")
    assert lines["ann"] == f'ann = "alice"  # {settings}:6'
    assert lines["timeout"] == f"timeout = inf             # {settings}:10"
    assert lines["level"] == 'level = "debug"  # environment: HUTCH_LOG_LEVEL'
    assert lines["retries"].endswith("  # default")
    assert "# proxy is not set" in config("show", "--origin")[1].splitlines()


def test_one_section_or_setting_is_shown_alone(config: Config) -> None:
    """The argument is its name as TOML spells it. JSON works too."""
    assert config("show", "accounts.map") == (0, '[accounts.map]\nann = "alice"\n"b.c" = "x"\n', "")
    assert config("show", 'accounts.map."b.c"')[1] == '[accounts.map]\n"b.c" = "x"\n'
    assert json.loads(config("show", "accounts.map", "-o", "json")[1]) == {"ann": "alice", "b.c": "x"}
    assert json.loads(config("show", "turns.retries", "-o", "json")[1]) == 2
    assert json.loads(config("show", "-o", "json")[1])["accounts"]["map"]["b.c"] == "x"


def test_origins_are_printed_as_json(config: Config, settings: Path) -> None:
    """`-o json --origin` prints one record for each setting."""
    records = json.loads(config("show", "accounts", "--origin", "-o", "json")[1])

    assert {"key": 'accounts.map."b.c"', "value": "x", "from": "file", "line": 7, "file": str(settings)} in records
    assert {"key": "accounts.umask", "value": "auto", "from": "default"} in records


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("limits.memry", "There is no setting limits.memry. Did you mean limits.memory?"),
        ("xyz", "There is no setting xyz. `hutch config show` lists them."),
        ("a..b", "`a..b` is not the name of a setting. Give SECTION or SECTION.KEY."),
        ("a = 1 #", "`a = 1 #` is not the name of a setting. Give SECTION or SECTION.KEY."),
    ],
)
def test_an_unknown_setting_is_refused(config: Config, name: str, said: str) -> None:
    """The error names the nearest setting."""
    assert config("show", name) == (2, "", f"hutch: {said}\n")


@pytest.mark.parametrize("verb", ["show", "check"])
def test_settings_that_cannot_be_used_are_refused_with_the_reason(
    config: Config, settings: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The error is the one with which hutchd refuses the file; the exit code is 2. hutchd is a new Python here."""
    monkeypatch.setattr(starting, "HUTCHD", HUTCHD)
    settings.write_text("[turns]\nretrys = 1\n")

    assert config(verb) == (
        2,
        "",
        f"hutch: {settings}: there is no setting turns.retrys; did you mean turns.retries?\n",
    )


def test_the_path_is_that_of_the_selected_hutchd(
    config: Config, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config path` prints the user's own file, or the host's with `--system`."""
    assert config("path") == (0, f"{settings}\n", "")
    monkeypatch.delenv("HUTCH_CONFIG")
    assert config("path", "--system")[1] == "/etc/hutch/hutch.toml\n"


def test_a_hosts_defaults_are_those_of_a_host(config: Config) -> None:
    """`--system` shows limits that a user's own hutchd does not have."""
    assert config("show", "isolation.require", "--system")[1] == '[isolation]\nrequire = "account"\n'
    assert config("show", "limits.pids", "--system", "--origin")[1] == "[limits]\npids = 4096  # default\n"
