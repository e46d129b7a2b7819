"""The master key: made once, kept to oneself, never replaced by accident."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from hutch_daemon.keys.master import CREDENTIAL, MasterKeyError, load_master_key


def test_the_first_start_makes_a_key_and_later_ones_read_it(tmp_path: Path) -> None:
    """The file has mode 0600 and holds the same key at every start."""
    made = load_master_key(tmp_path / "master.key", {})

    again = load_master_key(tmp_path / "master.key", {})
    assert made == again
    assert (tmp_path / "master.key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["master.key"]


def test_a_systemd_credential_comes_first(tmp_path: Path) -> None:
    """Where the service manager gives a key, no file is made."""
    (tmp_path / CREDENTIAL).write_bytes(base64.b64encode(bytes(32)))

    key = load_master_key(tmp_path / "master.key", {"CREDENTIALS_DIRECTORY": str(tmp_path)})

    assert key.source == "systemd credential"
    assert not (tmp_path / "master.key").exists()


@pytest.mark.parametrize("text", [b"", b"short", b"!" * 44, base64.b64encode(bytes(31))])
def test_a_damaged_key_refuses_to_start(tmp_path: Path, text: bytes) -> None:
    """A damaged file is never replaced: that would lose every stored key."""
    path = tmp_path / "master.key"
    path.write_bytes(text)
    path.chmod(0o600)

    with pytest.raises(MasterKeyError, match="damaged"):
        load_master_key(path, {})
    assert path.read_bytes() == text


def test_a_key_that_others_can_read_refuses_to_start(tmp_path: Path) -> None:
    """Mode 0640 is too open."""
    path = tmp_path / "master.key"
    load_master_key(path, {})
    path.chmod(0o640)

    with pytest.raises(MasterKeyError, match="0600"):
        load_master_key(path, {})


def test_a_link_is_no_master_key(tmp_path: Path) -> None:
    """Whoever can place a link could place a key of theirs."""
    load_master_key(tmp_path / "real", {})
    (tmp_path / "master.key").symlink_to(tmp_path / "real")

    with pytest.raises(MasterKeyError):
        load_master_key(tmp_path / "master.key", {})


def test_the_key_is_in_no_repr(tmp_path: Path) -> None:
    """A log line about it shows where it is from, not what it is."""
    key = load_master_key(tmp_path / "master.key", {})

    assert repr(key) == f"MasterKey(file {tmp_path / 'master.key'})"
