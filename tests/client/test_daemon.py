from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from hutch_client import endpoint, starting
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import UsageSeen
from tests.client.conftest import Hutch
from tests.client.fake_daemon import FakeDaemon

STATUS = m.Status(
    version=__version__,
    protocol=m.PROTOCOL,
    pid=42,
    started_at="2999-01-31T12:00:00.000Z",
    mode="user",
    draining=False,
    store=m.StoreStatus(ok=True, journal="j-1", path="/s/hutch.db", events=1),
    isolation=m.Isolation("strict", "bubblewrap"),
    keys="brokered",
    master_key="file",
    executors=(m.ExecutorStatus("x-1", "ann", "claude", "ready", 43),),
)
KEY = m.ApiKey("k-1", "anthropic", "default", 1000, "2026-01-31T12:00:00.000Z", "wxyz")

STAND_IN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
print("listening", flush=True)
listener.listen()
while not os.path.exists(sys.argv[2]):
    listener.settimeout(0.05)
    try:
        listener.accept()[0].close()
    except TimeoutError:
        pass
"""


def test_status_says_what_is_in_force_and_why(daemon: FakeDaemon, hutch: Hutch) -> None:
    """It shows isolation, keys and executors on standard output, and notices on standard error."""
    isolation = m.Isolation("account", "no sandbox", asked="account", missing="Install bubblewrap.", limits="8 GiB")
    daemon.answers["get_status"] = msgspec.structs.replace(STATUS, isolation=isolation, notices=("look here",))

    code, out, err = hutch("status")

    assert code == 0
    assert (
        "isolation   account: no sandbox\nat least    account\nfor more    Install bubblewrap.\nits limits  8 GiB\n"
        in out
    )
    assert "keys        brokered (master key: file)\n" in out
    assert out.endswith("x-1       ann      claude  ready  43\n")
    assert err == "! look here\n"


def test_doctor_finds_nothing_where_nothing_is_wrong(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Every line says ok."""
    daemon.answers |= {"get_status": STATUS, "list_api_keys": m.ApiKeys((KEY,))}

    code, out, _ = hutch("doctor")

    assert code == 0
    assert all(line.startswith("ok  ") for line in out.splitlines())


def test_doctor_says_what_to_do_about_what_it_finds(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Examples: a store that cannot write, exposed keys, another version, a quarantined executor."""
    stuck = m.ExecutorStatus("x-9", "ann", "claude", "quarantined", 99, detail="1 process left")
    daemon.answers |= {
        "get_status": msgspec.structs.replace(
            STATUS,
            version="9.9.9",
            keys="exposed",
            store=m.StoreStatus(False, "j-1", "/s", "ENOSPC"),
            executors=(stuck,),
        ),
        "list_api_keys": m.ApiKeys(()),
    }

    code, out, _ = hutch("doctor", "-o", "json")

    advice = {one["subject"].split(":")[0]: one["advice"] for one in json.loads(out) if not one["ok"]}
    assert code == 1
    assert list(advice) == ["versions", "store", "keys", "model keys", "executor x-9 (pid 99)"]
    assert advice["model keys"] == "Add one: `hutch key add anthropic`."


def test_doctor_and_version_work_without_a_daemon(hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` says how to start one; `version` prints the client's version."""
    monkeypatch.setenv("HUTCH_HOST", "/nonexistent/client.sock")

    doctor, version = hutch("doctor"), hutch("version")

    assert doctor[0] == 1
    assert "    → Start it: `hutch daemon start`.\n" in doctor[1]
    assert version[:2] == (0, f"hutch {__version__} (protocol {m.PROTOCOL})\n")


def test_stopping_waits_for_hutchds_end(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command waits until the connection and the process have ended."""

    def stop(_: object) -> m.Nothing:
        daemon.hang_up_after_answer = True
        return m.Nothing()

    daemon.answers |= {"get_status": msgspec.structs.replace(STATUS, pid=2**22 + 1), "stop_daemon": stop}

    assert hutch("daemon", "stop", "--leave", "--timeout", "5")[0] == 0
    assert daemon.asked("stop_daemon") == [m.StopDaemon("leave", 5.0)]


def test_a_backup_goes_to_an_absolute_path(
    daemon: FakeDaemon, hutch: Hutch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hutchd has another working directory, so the client makes the path absolute."""
    monkeypatch.chdir(tmp_path)
    daemon.answers["backup_store"] = m.BackupDone("x", 1024, "j-1")

    assert hutch("daemon", "backup", "copy.db")[0] == 0
    assert daemon.asked("backup_store") == [m.BackupStore(str(tmp_path / "copy.db"))]


def test_a_key_comes_from_standard_input_and_is_never_shown(
    daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command shows no hint for a short key."""
    daemon.answers["put_api_key"] = KEY
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-secret-wxyz\n"))

    code, out, err = hutch("key", "add", "anthropic", "--name", "work")

    assert (code, out, err) == (0, "", "Stored: anthropic default …wxyz\n")
    assert daemon.asked("put_api_key") == [m.PutApiKey("anthropic", "sk-secret-wxyz", "work")]


def test_a_key_in_argv_is_refused(daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty key is refused too."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))

    assert hutch("key", "add", "anthropic", "sk-secret")[0] == 2
    assert hutch("key", "add", "anthropic")[0] == 2
    assert daemon.asked("put_api_key") == []


def test_keys_are_listed_and_removed(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The list contains no secrets."""
    daemon.answers |= {"list_api_keys": m.ApiKeys((KEY,)), "delete_api_key": m.KeyDeleted()}

    assert hutch("key", "ls")[1].splitlines()[1].startswith("anthropic  default  api_key  …wxyz    0     never")
    assert hutch("key", "rm", "anthropic")[0] == 0
    assert daemon.asked("delete_api_key") == [m.DeleteApiKey("anthropic", "default")]


def test_usage_is_a_table(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The table has tokens by kind, and dollars."""
    daemon.answers["get_usage"] = m.UsageTable((m.UsageLine("opus", 2, UsageSeen(1000, 20, usd=0.5)),))

    assert hutch("usage", "--by", "model")[1].splitlines() == [
        "MODEL  TURNS  INPUT  CACHE READ  CACHE WRITE  OUTPUT  USD",
        "opus   2      1,000  0           0            20      0.5000  as the agent reports it",
    ]


def test_unknown_dollars_are_shown_as_unknown(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The reason, the number of requests and the cost of the others are beside them; searches too."""
    counted, why = UsageSeen(1000, 20, usd=0.5), "The price of the model X is unknown."
    daemon.answers["get_usage"] = m.UsageTable(
        (
            m.UsageLine("s-1", 2, UsageSeen(1000, 20), counted, 5, 8, 2, why),
            m.UsageLine("s-2", 1, UsageSeen(1, 1), unknown=1, why_unknown="The agent reports no price."),
        )
    )

    first, second = hutch("usage")[1].splitlines()[1:]

    assert first.split()[6] == second.split()[6] == "unknown"
    assert first.endswith("The price of the model X is unknown (2 of 5 requests; the others $0.5000); 8 web searches")
    assert second.endswith("The agent reports no price (1 turns; the others $0.0000); as the agent reports it")
    assert json.loads(hutch("usage", "-o", "json")[1])[0]["why_unknown"] == why


def test_a_server_of_another_account_is_sent_nothing(daemon: FakeDaemon) -> None:
    """The client first checks the server's uid, which must be its own, root's or that of Hutch's account."""
    with pytest.raises(HutchError, match="nothing was sent") as refused:
        endpoint.dial(daemon.path, trusted=())

    assert refused.value.reason is Reason.NOT_ALLOWED
    assert daemon.calls == []
    assert {0, os.geteuid()} <= endpoint.trusted_uids()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> Path:
    """A state directory for a hutchd that the test starts."""
    monkeypatch.setenv("HUTCH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("HUTCH_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_hutchd_is_started_once_with_its_log_in_the_state_directory(places: Path) -> None:
    """The second `start` finds the running hutchd."""
    argv = [sys.executable, "-c", STAND_IN, str(places / "client.sock"), str(places / "end")]
    try:
        pid = starting.start(argv)

        assert pid
        assert starting.start(argv) is None
        assert (places / "hutchd.log").read_text() == "listening\n"
        assert (places / "hutchd.log").stat().st_mode & 0o777 == 0o600
    finally:
        (places / "end").touch()


def test_a_hutchd_that_cannot_start_is_quoted(places: Path) -> None:
    """The error quotes the end of the log, beginning with this start."""
    (places / "hutchd.log").write_text("old story\n")
    argv = [sys.executable, "-c", "import sys; sys.exit('no such setting')"]

    with pytest.raises(HutchError) as failed:
        starting.start(argv)

    assert failed.value.reason is Reason.CONNECTION_LOST
    assert failed.value.message.endswith("ends with:\nno such setting")


def test_the_log_can_be_read(hutch: Hutch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints the last lines of the log without control characters."""
    monkeypatch.setenv("HUTCH_STATE_DIR", str(tmp_path))
    (tmp_path / "hutchd.log").write_text("one\ntwo\x1b[2J\nthree\n")

    assert hutch("daemon", "logs", "-n", "2") == (0, "two\nthree\n", "")
