from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from hutch_client.commands import MODULES
from hutch_shared import messages as m
from hutch_shared.agents import AGENTS
from tests.client.conftest import Hutch
from tests.client.fake_daemon import PERMISSION, SESSION, FakeDaemon
from tests.client.shells import complete_each_in_bash, complete_in_bash, environment
from tests.client.terminal import at_terminal
from tests.preloaded import PRELOADED
from tests.programs import required_program

LINES = {
    "hutch ": sorted([*MODULES, "help"]),
    "hutch co": ["compact", "completion", "config"],
    "hutch help fo": ["fork"],
    "hutch config ": ["check", "path", "show"],
    "hutch config show --o": ["--origin", "--output"],
    "hutch ps -o ": ["json", "jsonl", "text"],
    "hutch run --isolation ": ["account", "reduced", "strict"],
    "hutch run --isolation=st": ["strict"],
    "hutch mode x pl": ["plan"],
    "hutch run --model ": [],
    "hutch run 'fix it' ": [],
    "hutch nonsense ": [],
}


def test_bash_completes_commands_verbs_options_and_choices(clean_environment: None) -> None:
    """The completions come from the parsers. For free text nothing is offered, not even file names."""
    assert complete_each_in_bash([*LINES]) == LINES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_option_of_every_command_is_offered(hutch: Hutch, name: str) -> None:
    """Tab offers the options that `-h` shows, for each verb too."""
    verbs = _offered(f"hutch {name} ") if " VERB " in hutch(name, "-h")[1] else [""]

    for verb in verbs:
        words = f"{name} {verb}".split()
        told = re.findall(r"^  (?:-\w.*?, )?(--[\w-]+)", hutch(*words, "-h")[1], re.MULTILINE)
        assert sorted(_offered(f"hutch {' '.join(words)} --")) == sorted(told)


def _offered(line: str) -> list[str]:
    """Complete the line as bash does, without bash."""
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    read, write = os.pipe()
    started = PRELOADED.start("hutch", files={1: write, 2: write, 8: write, 9: write}, environment=environment(**asked))
    os.close(write)
    with open(read, encoding="utf-8") as offered:
        lines = offered.read().split()
    assert started.wait() == 0, lines
    return lines


def test_sessions_and_requests_come_from_hutchd(daemon: FakeDaemon) -> None:
    """They are offered by id and by name; closed sessions only for commands that accept these."""
    daemon.answers["list_sessions"] = lambda params: m.Sessions(
        (SESSION, *([msgspec.structs.replace(SESSION, id="s-2", name="old")] if params.state is None else []))
    )
    daemon.answers["list_permissions"] = m.Permissions((PERMISSION,))

    expected = {
        "hutch attach ": ["fix", SESSION.id],
        "hutch rm fix s-": ["s-0000000000000001", "s-2"],
        "hutch run --session f": ["fix"],
        "hutch approve ": [PERMISSION.id],
    }

    assert complete_each_in_bash([*expected]) == expected


def test_agents_are_offered_from_the_table() -> None:
    """`--agent` offers every agent of the table, without asking hutchd."""
    assert complete_in_bash("hutch run --agent ") == sorted(AGENTS)


def test_a_name_that_a_shell_could_run_is_not_offered(daemon: FakeDaemon) -> None:
    """Other users choose names, so a session with such a name is offered by id only."""
    names = ("$(touch x)", "a b", "`x`", "-rf", "x;y", "\x1b[2J", "ünï-1.2")
    daemon.answers["list_sessions"] = m.Sessions(
        tuple(msgspec.structs.replace(SESSION, id=f"s-{number}", name=name) for number, name in enumerate(names))
    )

    assert complete_in_bash("hutch attach ") == [*(f"s-{number}" for number in range(len(names))), "ünï-1.2"]


@pytest.mark.parametrize("host", ["/nonexistent/client.sock", "relative"])
def test_without_a_daemon_nothing_is_offered_or_printed(
    clean_environment: None, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Completion without a daemon prints no error."""
    monkeypatch.setenv("HUTCH_HOST", host)

    assert complete_in_bash("hutch attach ") == []


def test_a_silent_daemon_delays_completion_only_briefly(daemon: FakeDaemon) -> None:
    """Completion waits for hutchd for half a second, then offers nothing."""
    gone_on = threading.Event()

    def late(_: m.ListSessions) -> m.Sessions:
        gone_on.wait(60)
        return m.Sessions((SESSION,))

    daemon.answers["list_sessions"] = late

    assert complete_in_bash("hutch attach ") == []
    gone_on.set()


def test_files_and_directories_are_offered_where_they_are_meant(
    clean_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are offered as the user types them, quoted for bash. Hidden ones are offered after a dot."""
    monkeypatch.chdir(tmp_path)
    for name in ("sub", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "it's $(x) b.jsonl"):
        (tmp_path / name).touch()

    expected = {
        "hutch run --script ": ["a.jsonl", r"it\'s\ \$\(x\)\ b.jsonl", "sub/"],
        "hutch run -C ": ["sub/"],
        "hutch run -C ~/.h": ["~/.hidden/"],
        f"hutch policy test {tmp_path}/a": [f"{tmp_path}/a.jsonl"],
        "hutch run --script /nonexistent/": [],
    }

    assert complete_each_in_bash([*expected]) == expected


def test_only_accounts_of_users_are_offered(clean_environment: None) -> None:
    """Neither root nor a system account is offered."""
    offered = complete_in_bash("hutch run --account ")

    assert not {"root", "daemon", "nobody"} & {*offered}


def test_a_completion_imports_the_module_of_its_command_and_no_other(clean_environment: None) -> None:
    """It also imports no slow library, since the user waits for each completion."""
    code = """
import os, sys
from hutch_client.commands.completion import _parser
_parser(sys.argv[1])
print(*(name for name in sys.modules if name.startswith("hutch_client.commands.")))
print(*(name for name in ("anyio", "msgspec", "platformdirs", "structlog") if name in sys.modules))
"""

    for name, module in {"run": "run", "attach": "follow", "ps": "sessions", "": "completion", "key": "keys"}.items():
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
        modules, heavy = done.stdout.split("\n")[:2]

        allowed = {f"hutch_client.commands.{one}" for one in (module, "completion", "sessions")}
        assert {*modules.split()} <= allowed
        assert heavy == ""


@pytest.mark.system
def test_fish_completes(daemon: FakeDaemon) -> None:
    """fish gets each completion with a description."""
    daemon.answers["list_sessions"] = m.Sessions((SESSION,))
    code = "hutch completion fish | source; for line in $argv; complete -C $line; end"
    lines = ["hutch config ch", "hutch attach s-", "hutch run --isolation str"]

    done = subprocess.run(
        [required_program("fish"), "--no-config", "-c", code, *lines],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )

    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["check", SESSION.id, "strict"]
    assert "\tfix: idle, claude in /w\n" in done.stdout


@pytest.mark.system
def test_zsh_completes_what_is_typed(daemon: FakeDaemon, tmp_path: Path) -> None:
    """zsh completes at a terminal when Tab is pressed."""
    daemon.answers["list_sessions"] = m.Sessions((SESSION,))
    (tmp_path / ".zshrc").write_text("PS1='> '; autoload -U compinit; compinit -u; source <(hutch completion zsh)\n")
    with at_terminal(program=[required_program("zsh"), "-i"], environment=environment(ZDOTDIR=str(tmp_path))) as zsh:
        zsh.wait_for("> ")
        zsh.type("hutch conf\tpa\t\r")
        zsh.wait_for("hutch.toml")
        zsh.type("hutch attach s-\t")
        zsh.wait_for(SESSION.id.removeprefix("s-"))


def test_a_script_comes_for_each_shell_and_for_no_other(hutch: Hutch) -> None:
    """The help names the file to put it into."""
    assert [hutch("completion", name)[0] for name in ("bash", "zsh", "fish")] == [0, 0, 0]
    assert hutch("completion", "tcsh")[0] == 2
    assert "source <(hutch completion bash)" in hutch("completion", "-h")[1]
