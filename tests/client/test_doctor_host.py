"""`hutch doctor` on a host where one hutchd serves many users."""

from __future__ import annotations

import json
import os
import sys

import msgspec
import pytest

from hutch_daemon.doctor.sudoers import rule
from hutch_shared import messages as m
from tests.client.conftest import Hutch
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_daemon import STATUS
from tests.programs import visudo


def test_the_sudo_rule_is_printed_as_a_file(hutch: Hutch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output has nothing else, so it can be redirected to a file.

    Standard error says whether sudo accepts the rule.
    """
    visudo()
    monkeypatch.setenv("HUTCH_CONFIG", "/nonexistent/hutch.toml")

    code, out, err = hutch("doctor", "--sudo")

    assert code == 0
    assert out == rule(os.path.join(sys.prefix, "bin", "hutch-launcher"), "hutch")
    assert err.startswith("visudo accepts the rule. As root: hutch doctor --sudo | install -m 440 /dev/stdin /etc/")


def test_an_administrator_needs_no_key_of_their_own(daemon: FakeDaemon, hutch: Hutch) -> None:
    """Each user of a host has their own keys. The needs of a higher isolation level are shown and are not a problem."""
    isolation = m.Isolation("account", "apart", missing="bubblewrap is not installed.")
    status = msgspec.structs.replace(STATUS, mode="system", isolation=isolation)
    daemon.answers |= {"get_status": status, "list_api_keys": m.ApiKeys(())}

    code, out, _ = hutch("doctor", "-o", "json")
    subjects = [one["subject"] for one in json.loads(out)]

    assert code == 0
    assert "isolation: account; for more: bubblewrap is not installed." in subjects
