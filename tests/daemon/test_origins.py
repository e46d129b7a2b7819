from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_daemon.origins import Setting, lines_of, show
from hutch_daemon.settings import SettingsError

TEXT = '''\
# [turns]
turns.retries = 2          # as it would be anyway

[accounts]  # who as whom
map = { ann = "alice", "b.c" = "x" }
dedicated = [
  "a]",                    # ]
  "[b",
]
run_as.ann = ["q"]

[ "sandbox" ]
show = ["""
[logs]
level = "error"
""", 'write = ["/"]']
  'write'  = []

[providers."my.own".prices]
[providers."my.own".prices."m 1"]
input = 1
output = 2
[providers."my.own"]
base_url = "https://me:secret@models.example.com/v1"
'''


def _shown(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **how: Any) -> dict[str, Setting]:
    path = tmp_path / "hutch.toml"
    path.write_text(text)
    return {".".join(one.key): one for one in show(path, environ or {}, **how).settings}


def test_each_setting_of_the_file_has_its_line(tmp_path: Path) -> None:
    """This holds for every TOML spelling of a key, and for values that look like keys."""
    from_file = {key: one.line for key, one in _shown(tmp_path, TEXT).items() if one.origin == "file"}

    assert from_file == {
        "turns.retries": 2,
        "accounts.map.ann": 5,
        "accounts.map.b.c": 5,
        "accounts.dedicated": 6,
        "accounts.run_as.ann": 10,
        "sandbox.show": 13,
        "sandbox.write": 17,
        "providers.my.own.prices.m 1.input": 21,
        "providers.my.own.prices.m 1.output": 22,
        "providers.my.own.base_url": 24,
    }


def test_a_setting_in_the_file_has_its_line_even_if_it_equals_the_default(tmp_path: Path) -> None:
    """The other settings of its section are defaults."""
    shown = _shown(tmp_path, TEXT)

    assert shown["turns.retries"] == Setting(("turns", "retries"), 2, "file", line=2)
    assert shown["turns.timeout"] == Setting(("turns", "timeout"), 86400.0, "default")
    assert _shown(tmp_path, "[accounts]\nmap = {}\n")["accounts.map"].origin == "file"


def test_the_environment_takes_precedence_over_the_file(tmp_path: Path) -> None:
    """The origin names the variable; an empty one counts as unset."""
    text = '[logs]\nlevel = "error"\n'

    named = _shown(tmp_path, text, {"HUTCH_LOG_LEVEL": "debug"})["logs.level"]
    unnamed = _shown(tmp_path, text, {"HUTCH_LOG_LEVEL": ""})["logs.level"]

    assert named == Setting(("logs", "level"), "debug", "environment", variable="HUTCH_LOG_LEVEL")
    assert unnamed == Setting(("logs", "level"), "error", "file", line=2)


def test_a_user_and_password_in_an_address_are_left_out(tmp_path: Path) -> None:
    """The output may be sent to other people."""
    shown = _shown(tmp_path, TEXT + '[broker]\nproxy = "http://token@proxy:3128"\n')

    assert shown["providers.my.own.base_url"].value == "https://***@models.example.com/v1"
    assert shown["broker.proxy"].value == "http://***@proxy:3128"


def test_system_mode_has_its_own_defaults(tmp_path: Path) -> None:
    """A host's sessions have limits by default; a user's own have only those in the file."""
    host, own = _shown(tmp_path, "", system=True), _shown(tmp_path, "")

    assert (host["isolation.require"].value, own["isolation.require"].value) == ("account", "reduced")
    assert (host["limits.pids"].value, own["limits.pids"].value) == (4096, None)
    assert _shown(tmp_path, "limits.pids = 99", system=True)["limits.pids"].value == 99


def test_without_a_file_all_settings_are_defaults(tmp_path: Path) -> None:
    """The output says that there is no file."""
    shown = show(tmp_path / "none.toml", {})

    assert not shown.there
    assert {one.origin for one in shown.settings} == {"default"}


@pytest.mark.parametrize("text", ["[turns\n", "[turns]\nretrys = 1\n", "turns.retries = 'many'\n"])
def test_invalid_settings_are_not_shown(tmp_path: Path, text: str) -> None:
    """hutchd would not start with them, so the reason is reported instead."""
    with pytest.raises(SettingsError, match=r"hutch\.toml"):
        _shown(tmp_path, text)


NAMES = st.text("ab.\"'[]=#\n é", min_size=1, max_size=4)
VALUES = st.recursive(
    st.integers() | st.booleans() | st.text("ab\"'[]{}=#\n\\", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), VALUES, st.booleans()), max_size=6))
def test_a_line_is_where_the_statement_of_its_key_begins(statements: list[tuple[list[str], Any, bool]]) -> None:
    """This holds for any keys and values, on one line or several."""
    lines: list[str] = []
    begins: dict[tuple[str, ...], int] = {}
    for number, (key, value, spread) in enumerate(statements):
        whole = (f"k{number}", *key)
        begins[whole] = len(lines) + 1
        lines += f"{'.'.join(map(_string, whole))} = {_toml(value, spread=spread)}".split("\n")
        lines += ["", "# x = 1"][: number % 3]
    text = "\n".join(lines)

    found = lines_of(text)

    assert tomllib.loads(text) is not None
    assert {key: found[key] for key in begins} == begins


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _toml(value: Any, *, spread: bool) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(max(-(2**63), min(2**63 - 1, value)))
        case str() if spread:
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"""\n{escaped}"""'
        case str():
            return _string(value)
        case list():
            inner = (",\n" if spread else ", ").join(_toml(one, spread=spread) for one in value)
            return f"[\n{inner}\n# ]\n]" if spread else f"[{inner}]"
        case _:
            pairs = (f"{_string(name)} = {_toml(one, spread=False)}" for name, one in value.items())
            return f"{{{', '.join(pairs)}}}"


def test_the_shown_defaults_are_a_valid_settings_file(tmp_path: Path) -> None:
    """No default is a value that the file would refuse."""
    given = {key: one.value for key, one in _shown(tmp_path, "").items() if one.value not in (None, {})}

    text = "\n".join(f"{key} = {_toml_of(value)}" for key, value in given.items())

    assert {key: one.origin for key, one in _shown(tmp_path, text).items() if key in given} == dict.fromkeys(
        given, "file"
    )


def _toml_of(value: Any) -> str:
    return (
        repr(value)
        if isinstance(value, float)
        else _toml([*value] if isinstance(value, tuple) else value, spread=False)
    )
