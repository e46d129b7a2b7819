"""`hutch key`, and the reports of `status`, `doctor` and `usage` on keys, with a fake hutchd."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import msgspec
import pytest

from hutch_shared import messages as m
from hutch_shared.events import UsageSeen
from tests.client.conftest import Hutch
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_daemon import KEY, STATUS

LOG_IN = {
    "access_token": "access-secret",
    "refresh_token": "refresh-secret",
    "refresh_url": "https://token.example",
    "client_id": "hutch",
    "expires_at": "2999-01-31T12:00:00Z",
    "token_type": "Bearer",
}


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_key_is_stored_with_its_base_url(daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has its kind, its name and its base URL."""
    daemon.answers["put_api_key"] = KEY
    type_in(monkeypatch, "token\n")

    code, _, _ = hutch("key", "add", "anthropic", "--kind", "gateway", "--base-url", "https://gate.example/v1")

    assert code == 0
    (put,) = daemon.asked("put_api_key")
    assert (put.kind, put.base_url, put.secret) == ("gateway", "https://gate.example/v1", "token")


def test_a_log_in_is_read_as_json(daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sends the fields for refreshing, and drops other fields of a token endpoint."""
    daemon.answers["put_api_key"] = KEY
    type_in(monkeypatch, json.dumps(LOG_IN))

    code, out, err = hutch("key", "add", "anthropic", "--oauth")

    assert (code, out) == (0, "")
    assert "secret" not in err
    (put,) = daemon.asked("put_api_key")
    assert (put.kind, put.secret, put.refresh_token) == ("oauth", "access-secret", "refresh-secret")
    assert (put.refresh_url, put.client_id) == ("https://token.example", "hutch")
    assert put.expires_at == "2999-01-31T12:00:00Z"


@pytest.mark.parametrize("seconds", [3600, "3600"])
def test_a_log_in_may_have_a_lifetime(
    daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch, seconds: Any
) -> None:
    """A lifetime in seconds is converted to a time."""
    daemon.answers["put_api_key"] = KEY
    type_in(monkeypatch, json.dumps({"access_token": "a", "expires_in": seconds}))

    assert hutch("key", "add", "anthropic", "--oauth")[0] == 0
    assert daemon.asked("put_api_key")[0].expires_at.endswith("Z")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-secret",
        '["sk-secret"]',
        '{"token": "sk-secret"}',
        '{"access_token": "a"',
        '{"access_token": "a", "x": ' + 100_000 * "[",
        '{"access_token": "a", "expires_in": 1e999}',
    ],
    ids=["nothing", "a key", "a list", "another name", "not closed", "too deeply nested", "a time without a value"],
)
def test_an_invalid_log_in_is_refused_and_not_shown(
    daemon: FakeDaemon, hutch: Hutch, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The error names the expected fields."""
    type_in(monkeypatch, text)

    code, out, err = hutch("key", "add", "anthropic", "--oauth")

    assert (code, out) == (2, "")
    assert "access_token" in err
    assert "sk-secret" not in err
    assert daemon.asked("put_api_key") == []


def test_a_key_in_argv_is_not_repeated(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The error explains where a key is read from, and prints the usage of this verb."""
    code, out, err = hutch("key", "add", "anthropic", "--name", "work", "sk-secret")

    assert (code, out) == (2, "")
    assert "a key cannot be an argument" in err
    assert err.startswith("usage: hutch key add ")
    assert "sk-secret" not in err


def test_a_key_is_chosen(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The list marks the chosen key, and gives the reason for a key that cannot be used."""
    chosen = msgspec.structs.replace(KEY, chosen=True, base_url="https://gate.example", trouble="It is an old one.")
    daemon.answers |= {"use_api_key": m.Nothing(), "list_api_keys": m.ApiKeys((chosen,))}

    assert hutch("key", "use", "anthropic", "default")[0] == 0
    _, out, err = hutch("key", "ls")

    assert daemon.asked("use_api_key") == [m.UseApiKey("anthropic", "default")]
    assert "default *" in out
    assert "https://gate.example" in out
    assert err == "! anthropic default: It is an old one.\n"


def test_it_is_explained_which_key_is_used(daemon: FakeDaemon, hutch: Hutch) -> None:
    """For a provider or a session, the command shows the key, the reason, and what the agent gets."""
    daemon.answers["explain_key"] = m.KeyExplained(KEY, "it is your only key", "lease", "The broker puts it in.")

    _, out, _ = hutch("key", "explain", "anthropic")
    hutch("key", "explain", "--session", "fix")

    assert "it is your only key" in out
    assert "lease" in out
    assert daemon.asked("explain_key") == [m.ExplainKey(provider="anthropic"), m.ExplainKey(session="fix")]


def test_the_master_key_is_rotated(daemon: FakeDaemon, hutch: Hutch) -> None:
    """The command prints the number of rewrapped keys, and warns that older backups need the old master key."""
    daemon.answers["rotate_master_key"] = m.MasterRotated("file /s/master.key", 3)
    code, _, err = hutch("key", "rotate-master")
    daemon.answers["rotate_master_key"] = m.MasterRotated("file /s/master.key", 1)

    assert "1 envelope was wrapped" in hutch("key", "rotate-master")[2]
    assert code == 0
    assert "3 envelopes were" in err
    assert "new backup" in err


@pytest.mark.parametrize(
    ("broker", "words", "advice"),
    [
        (m.BrokerState("up", leases=2, requests=1, refused=4), "up: 2 leases, 0 streams, 1 request, 4 refused", False),
        (m.BrokerState("down", "it does not start"), "DOWN: it does not start", True),
        (m.BrokerState("idle"), "not started: no key has been needed yet", False),
    ],
)
def test_status_shows_the_state_of_the_broker(
    daemon: FakeDaemon, hutch: Hutch, broker: m.BrokerState, words: str, advice: bool
) -> None:
    """`status` and `doctor` show it; for a broker that is down, `doctor` gives advice."""
    status = msgspec.structs.replace(STATUS, broker=broker)
    daemon.answers |= {"get_status": status, "list_api_keys": m.ApiKeys((KEY,))}

    _, shown, _ = hutch("status")
    _, out, _ = hutch("doctor", "-o", "json")

    findings = {one["subject"]: one["advice"] for one in json.loads(out)}
    assert f"broker     {words}\n" in shown
    assert (findings[f"broker: {words}"] is not None) == advice
    assert "master key in use: file" in findings


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (UsageSeen(100, 20, usd=0.5), ""),
        (UsageSeen(90, 20, usd=0.5), "the agent reports 90 tokens in, 20 out, $0.5000"),
    ],
)
def test_usage_is_the_brokers_and_a_difference_is_shown(
    daemon: FakeDaemon, hutch: Hutch, said: UsageSeen, words: str
) -> None:
    """The agent's own count is shown beside the broker's only if it differs."""
    row = m.UsageLine("s-1", 2, said, UsageSeen(100, 20, usd=0.501), 3)
    daemon.answers["get_usage"] = m.UsageTable((row,))

    line = hutch("usage")[1].splitlines()[1]

    assert line.split()[:7] == ["s-1", "2", "100", "0", "0", "20", "0.5010"]
    assert line.partition("0.5010")[2].strip() == words
