from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from hutch_client.commands import MODULES
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
    """They are started often, by people and by scripts: a socket and JSON are enough."""
    assert _loaded(*words.split()) == ["loaded"]


def test_the_streaming_commands_import_neither_sdk_nor_dispatcher(daemon: FakeDaemon) -> None:
    """A client asks and is told; it has nothing to dispatch."""
    daemon.answers["read_events"] = m.EventsPage((), "j-1", 0, more=False)

    assert _loaded("logs", SESSION.id, heavy=("claude_agent_sdk", "jsonrpcserver", "structlog", "pydantic")) == [
        "loaded"
    ]


def test_a_reader_that_has_seen_enough_is_no_error(daemon: FakeDaemon) -> None:
    """`hutch logs … | head` ends quietly."""
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
    """With -h, on standard output."""
    from hutch_client.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main([name, "-h"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hutch {name}")
