"""The settings file: the files that are refused, with their messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch_daemon.settings import Settings, SettingsError, load, parse


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    """A host without a settings file works."""
    settings = load(tmp_path / "hutch.toml", {})

    assert settings == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[socket]\n", "there is no setting socket; did you mean sockets?"),
        ("[turns]\ntimout = 3\n", "there is no setting turns.timout; did you mean turns.timeout?"),
        ("[providers.anthropic]\nbase_urll = 'x'\n", "did you mean providers.anthropic.base_url?"),
        ("[turns]\ntimeout = -1\n", "turns.timeout"),
        ("[turns]\ntimeout = 'long'\n", "turns.timeout"),
        ("turns = 3\n", "turns"),
        ("[turns\n", "is not TOML"),
        ("[permissions]\nmode = 'yolo'\n", "permissions.mode"),
        ("[sandbox]\nallow = ['https://example.com']\n", "'https://example.com' is not a host: write example.com"),
    ],
)
def test_a_wrong_setting_is_named(text: str, said: str) -> None:
    """A file with an unknown key or an invalid value is refused; the error names the place."""
    with pytest.raises(SettingsError) as refused:
        parse(text, "hutch.toml", {})

    assert said in str(refused.value)


def test_the_environment_sets_the_log_level() -> None:
    """HUTCH_LOG_LEVEL takes precedence over the file."""
    settings = parse("[logs]\nlevel = 'error'\n", "hutch.toml", {"HUTCH_LOG_LEVEL": "debug"})

    assert settings.logs.level == "debug"
