"""The master key: created once, readable by its owner alone, never replaced by accident."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hutch_daemon.keys.master import CREDENTIAL, MasterKeyError, load_master_keys


class FakeKeyring(ModuleType):
    """An OS keyring in memory."""

    def __init__(self) -> None:
        super().__init__("keyring")
        self.kept: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, name: str) -> str | None:
        return self.kept.get((service, name))

    def set_password(self, service: str, name: str, text: str) -> None:
        self.kept[service, name] = text

    def delete_password(self, service: str, name: str) -> None:
        del self.kept[service, name]


@pytest.fixture
def keyring(monkeypatch: pytest.MonkeyPatch) -> FakeKeyring:
    fake = FakeKeyring()
    monkeypatch.setitem(sys.modules, "keyring", fake)
    return fake


def test_the_first_start_makes_a_key_and_later_ones_read_it(tmp_path: Path) -> None:
    """The file has mode 0600 and holds the same key at every start."""
    made = load_master_keys(tmp_path / "master.key", {})

    again = load_master_keys(tmp_path / "master.key", {})
    assert made.all() == again.all()
    assert (tmp_path / "master.key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["master.key"]


def test_a_systemd_credential_comes_first(tmp_path: Path) -> None:
    """If the service manager passes a key, hutchd creates no file."""
    (tmp_path / CREDENTIAL).write_bytes(base64.b64encode(bytes(32)))

    keys = load_master_keys(tmp_path / "master.key", {"CREDENTIALS_DIRECTORY": str(tmp_path)})

    assert keys.source == "systemd credential"
    assert not (tmp_path / "master.key").exists()


def test_an_old_key_file_still_opens_its_envelopes(tmp_path: Path) -> None:
    """After a move to systemd credentials, keys sealed under the file's key still open."""
    before = load_master_keys(tmp_path / "master.key", {})
    (tmp_path / CREDENTIAL).write_bytes(base64.b64encode(bytes(32)))
    (tmp_path / f"{CREDENTIAL}-old").write_bytes(base64.b64encode(b"1" * 32))

    keys = load_master_keys(tmp_path / "master.key", {"CREDENTIALS_DIRECTORY": str(tmp_path)})

    assert [key.key for key in keys.all()] == [bytes(32), b"1" * 32, before.current.key]
    with pytest.raises(MasterKeyError, match="-old"):
        keys.begin_rotation()


def test_a_keyring_is_used_if_the_settings_say_so(tmp_path: Path, keyring: FakeKeyring) -> None:
    """The keyring's key takes precedence over the file's, and a rotation changes it in the keyring."""
    keys = load_master_keys(tmp_path / "master.key", {}, keyring=True)
    before = keys.current
    keys.begin_rotation()
    interrupted = load_master_keys(tmp_path / "master.key", {}, keyring=True)
    keys.finish_rotation()
    after = load_master_keys(tmp_path / "master.key", {}, keyring=True)

    assert keys.source == "keyring"
    assert interrupted.all() == (keys.current, before)
    assert after.all() == (keys.current,)
    assert len(keyring.kept) == 1
    assert os.listdir(tmp_path) == []


def test_a_keyring_that_is_not_installed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hutchd never falls back to a file silently."""
    monkeypatch.setitem(sys.modules, "keyring", None)

    with pytest.raises(MasterKeyError, match="hutch\\[keyring\\]"):
        load_master_keys(tmp_path / "master.key", {}, keyring=True)


@pytest.mark.parametrize("text", [b"", b"short", b"!" * 44, base64.b64encode(bytes(31))])
def test_a_damaged_key_refuses_to_start(tmp_path: Path, text: bytes) -> None:
    """hutchd never replaces a damaged file: that would lose every stored key."""
    path = tmp_path / "master.key"
    path.write_bytes(text)
    path.chmod(0o600)

    with pytest.raises(MasterKeyError, match="damaged"):
        load_master_keys(path, {})
    assert path.read_bytes() == text


def test_a_key_that_others_can_read_refuses_to_start(tmp_path: Path) -> None:
    """Mode 0640 is too open."""
    path = tmp_path / "master.key"
    load_master_keys(path, {})
    path.chmod(0o640)

    with pytest.raises(MasterKeyError, match="0600"):
        load_master_keys(path, {})


def test_a_symbolic_link_is_refused_as_master_key(tmp_path: Path) -> None:
    """A user who can create the link could point it at another key."""
    load_master_keys(tmp_path / "real", {})
    (tmp_path / "master.key").symlink_to(tmp_path / "real")

    with pytest.raises(MasterKeyError):
        load_master_keys(tmp_path / "master.key", {})


def test_a_rotation_destroys_the_old_key(tmp_path: Path) -> None:
    """During the rotation both keys exist; afterwards the file no longer holds the old one's bytes."""
    path = tmp_path / "master.key"
    keys = load_master_keys(path, {})
    old = path.read_bytes()
    handle = os.open(path, os.O_RDONLY)
    keys.begin_rotation()
    during = sorted(os.listdir(tmp_path))
    keys.finish_rotation()
    left = os.pread(handle, 100, 0)
    os.close(handle)

    assert during == ["master.key", "master.key.next"]
    assert os.listdir(tmp_path) == ["master.key"]
    assert old.strip() not in left
    assert load_master_keys(path, {}).all() == (keys.current,)


def test_the_key_is_in_no_repr(tmp_path: Path) -> None:
    """The repr of a master key names its source, not its value."""
    keys = load_master_keys(tmp_path / "master.key", {})

    assert repr(keys.current) == f"MasterKey(file {tmp_path / 'master.key'})"
    assert repr(keys) == f"<MasterKeys file {tmp_path / 'master.key'}, 0 older>"
