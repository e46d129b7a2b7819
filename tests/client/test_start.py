from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from hutch_client.commands import MODULES, Parser
from hutch_shared import messages as m
from tests.client.fake_daemon import SESSION, FakeDaemon, event

HEAVY = ("anyio", "asyncio", "msgspec", "claude_agent_sdk", "jsonrpcserver", "structlog", "platformdirs", "pydantic")
LOOK = """
import sys
from hutch_client.__main__ import main
try:
    code = main(sys.argv[1:])
finally:
    print("loaded", *(set(sys.modules) & set({heavy})), file=sys.stderr)
sys.exit(code)
"""


def _loaded(*words: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    argv = [sys.executable, "-c", LOOK.format(heavy=heavy), *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize("words", ["ps", "pending", "approve p-1", "status", "key ls", "policy show", "daemon stop"])
def test_plain_commands_import_nothing_heavy(daemon: FakeDaemon, words: str) -> None:
    """Users and scripts call them often, and they need only a socket and JSON."""
    assert _loaded(*words.split()) == ["loaded"]


def test_the_streaming_commands_import_neither_sdk_nor_dispatcher(daemon: FakeDaemon) -> None:
    """A client sends requests and dispatches none, so it does not import the dispatcher."""
    daemon.answers["read_events"] = m.EventsPage((), "j-1", 0, more=False)

    assert _loaded("logs", SESSION.id, heavy=("claude_agent_sdk", "jsonrpcserver", "structlog", "pydantic")) == [
        "loaded"
    ]


def test_a_closed_output_pipe_is_not_an_error(daemon: FakeDaemon) -> None:
    """`hutch logs … | head` ends without a message."""
    events = [event(seq, "text", {"text": "x" * 1000}) for seq in range(1, 1001)]
    raw = tuple(msgspec.Raw(msgspec.json.encode(one)) for one in events)
    daemon.answers["read_events"] = m.EventsPage(raw, "j-1", 1000, more=False)
    argv = [sys.executable, "-m", "hutch_client", "logs", SESSION.id]

    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        complaints = process.stderr.read()

    assert b"Traceback" not in complaints
    assert process.returncode == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_command_explains_itself(daemon: FakeDaemon, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With `-h`, on standard output."""
    from hutch_client.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main([name, "-h"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hutch {name}")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        for child in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _parsers(child)


@pytest.mark.parametrize("name", MODULES)
def test_every_option_of_every_command_says_what_it_is_for(name: str) -> None:
    """`-h` explains every option."""
    command = importlib.import_module(f"hutch_client.commands.{MODULES[name]}").COMMANDS[name]
    parser = Parser(prog=f"hutch {name}", description=command.doc)
    command.arguments(parser)

    for one in _parsers(parser):
        assert one.description
        for action in one._actions:
            is_told = action.help or isinstance(action, argparse._SubParsersAction)
            assert is_told, f"{one.prog} {'/'.join(action.option_strings) or action.dest}"


@pytest.mark.parametrize("words", [["key"], ["policy"], ["daemon"]])
def test_a_group_without_a_verb_lists_its_verbs(
    daemon: FakeDaemon, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing verb is a usage error, so the list goes to standard error."""
    from hutch_client.__main__ import main

    assert main(words) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "verbs:" in printed.err


@pytest.mark.parametrize("words", [["ps"], ["logs", SESSION.id], ["key", "ls"], ["help"]])
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_replaced(daemon: FakeDaemon, words: list[str], closed: int) -> None:
    """Otherwise another file, such as a socket, would get its descriptor, and then the output."""
    daemon.answers |= {
        "list_sessions": m.Sessions((SESSION,)),
        "read_events": m.EventsPage((), "j-1", 0, more=False),
        "list_api_keys": m.ApiKeys(()),
    }
    start = "import os, sys; os.close(int(sys.argv[1])); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    argv = [sys.executable, "-c", start, str(closed), "-m", "hutch_client", *words]

    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("words", [["ps"], ["logs", SESSION.id], ["help"]])
def test_output_that_cannot_be_written_is_reported(daemon: FakeDaemon, words: list[str]) -> None:
    """On a full disk the command prints an error without a traceback."""
    raw = msgspec.Raw(msgspec.json.encode(event(1, "text", {"text": "Hello"})))
    daemon.answers |= {
        "list_sessions": m.Sessions((SESSION,)),
        "read_events": m.EventsPage((raw,), "j-1", 1, more=False),
    }
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hutch_client", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )

    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        ["hutch: The output could not be written: No space left on device."],
    )


def test_unencodable_characters_do_not_stop_the_output(daemon: FakeDaemon) -> None:
    """Text gets question marks; JSON gets escapes, so that programs lose nothing."""
    raw = msgspec.Raw(msgspec.json.encode(event(1, "text", {"text": "wörld 😀"})))
    daemon.answers["read_events"] = m.EventsPage((raw,), "j-1", 1, more=False)
    argv = [sys.executable, "-m", "hutch_client", "logs", SESSION.id]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}

    text, lines = (
        subprocess.run([*argv, *more], capture_output=True, check=True, env=ascii_only).stdout.decode("ascii")
        for more in ([], ["-o", "jsonl"])
    )

    assert text == "w?rld ?\n"
    assert json.loads(lines)["data"]["text"] == "wörld 😀"
