"""Whether a host has a hutchd of its own: by its units or by a mark, and by nothing that comes and goes."""

from __future__ import annotations

import stat
from pathlib import Path
from threading import Event, Thread

import pytest

from hutch_shared.host_mark import MARK, STATE_MODE, host_socket, is_marked, leave_mark, service_account, start_command

UNITS = "etc/systemd/system"


def _write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_host_without_units_and_mark_has_none(tmp_path: Path) -> None:
    """Its rules, its settings, its state and the directory of its sockets say nothing."""
    _write(tmp_path, "etc/hutch/policy.toml")
    _write(tmp_path, "etc/hutch/hutch.toml")
    _write(tmp_path, "etc/hutch/launcher.toml")
    _write(tmp_path, "var/lib/hutch/hutch.db")
    _write(tmp_path, "run/hutch/client.sock")

    assert host_socket(tmp_path) is None


@pytest.mark.parametrize(
    "unit", [f"{UNITS}/hutchd.service", f"{UNITS}/hutchd.socket", "Library/LaunchDaemons/io.hutch.hutchd.plist"]
)
def test_one_installed_unit_suffices(tmp_path: Path, unit: str) -> None:
    """Also before the first start, when there is no state directory."""
    _write(tmp_path, unit)

    assert host_socket(tmp_path) == Path("/run/hutch/client.sock")


def test_a_masked_unit_is_installed(tmp_path: Path) -> None:
    """An administrator who masks it wants no hutchd to run, and no private ones in its place."""
    (tmp_path / UNITS).mkdir(parents=True)
    (tmp_path / UNITS / "hutchd.service").symlink_to("/nonexistent")

    assert host_socket(tmp_path) == Path("/run/hutch/client.sock")


def test_the_socket_is_where_its_unit_listens(tmp_path: Path) -> None:
    """A host's directories may be others than the usual ones; systemd doubles `%`."""
    _write(tmp_path, f"{UNITS}/hutchd.socket", "[Socket]\nListenStream=/srv/100%%/client.sock\nSocketMode=0666\n")

    assert host_socket(tmp_path) == Path("/srv/100%/client.sock")


@pytest.mark.parametrize(
    ("text", "socket"), [("/srv/run/client.sock\n", "/srv/run/client.sock"), ("", None), ("x", None)]
)
def test_the_mark_names_the_socket(tmp_path: Path, text: str, socket: str | None) -> None:
    """A mark with any other text counts, for the usual socket."""
    _write(tmp_path, f"var/lib/hutch/{MARK}", text)

    assert host_socket(tmp_path) == Path(socket or "/run/hutch/client.sock")


def test_the_mark_can_be_found_and_nothing_else(tmp_path: Path) -> None:
    """Other accounts may pass through the state directory; its entries are closed to them."""
    socket = tmp_path / "run" / "client.sock"
    for name, mode in (("hutch.db", 0o600), ("copy.db", 0o644)):
        _write(tmp_path, name)
        (tmp_path / name).chmod(mode)
    (tmp_path / "spool").mkdir(0o755)
    tmp_path.chmod(0o700)

    assert leave_mark(tmp_path, socket) is None

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, *tmp_path.iterdir())}
    assert is_marked(tmp_path)
    assert (tmp_path / MARK).read_text() == f"{socket}\n"
    assert modes == {tmp_path.name: STATE_MODE, MARK: 0o644, "hutch.db": 0o600, "copy.db": 0o600, "spool": 0o700}


def test_the_directory_of_the_socket_stays_open(tmp_path: Path) -> None:
    """With HUTCH_STATE_DIR it is in the state directory, and every account connects there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)

    leave_mark(tmp_path, tmp_path / "run" / "client.sock")

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755


def test_files_may_come_and_go_while_the_mark_is_left(tmp_path: Path) -> None:
    """hutchd serves already: the database's log, backups and records appear and disappear."""
    over = Event()

    def churn() -> None:
        while not over.is_set():
            _write(tmp_path, "hutch.db-wal")
            (tmp_path / "hutch.db-wal").unlink()

    thread = Thread(target=churn)
    thread.start()
    try:
        troubles = {leave_mark(tmp_path, Path("/run/a.sock")) for _ in range(300)}
    finally:
        over.set()
        thread.join()

    assert troubles == {None}


def test_the_mark_is_written_once(tmp_path: Path) -> None:
    """A later start of the same hutchd leaves it as it is; another socket replaces it."""
    leave_mark(tmp_path, Path("/run/a.sock"))
    first = (tmp_path / MARK).stat().st_ino
    leave_mark(tmp_path, Path("/run/a.sock"))
    second = (tmp_path / MARK).stat().st_ino
    leave_mark(tmp_path, Path("/run/b.sock"))

    assert first == second
    assert (tmp_path / MARK).read_text() == "/run/b.sock\n"


@pytest.mark.parametrize(
    ("unit", "drop_ins", "account"),
    [
        ("User=hutch\n", {}, "hutch"),
        ("User=coder\n", {}, "coder"),
        ("User=hutch\n", {"50-mine.conf": "[Service]\nUser=coder\n"}, "coder"),
        ("User=hutch\n", {"10-a.conf": "User=a\n", "90-z.conf": "User=z\n"}, "z"),
        ("", {"10-a.conf": "UMask=0077\n"}, None),
    ],
)
def test_the_account_is_that_of_the_unit(
    tmp_path: Path, unit: str, drop_ins: dict[str, str], account: str | None
) -> None:
    """systemd takes the last `User=` of the unit and its drop-ins, which it reads in the order of their names."""
    _write(tmp_path, f"{UNITS}/hutchd.service", f"[Service]\n{unit}")
    for name, text in drop_ins.items():
        _write(tmp_path, f"{UNITS}/hutchd.service.d/{name}", text)

    assert service_account(tmp_path) == account


def test_the_command_that_starts_it_is_that_of_its_manager(tmp_path: Path) -> None:
    """A unit without a running systemd is started by hand, as is a hutchd without a unit."""
    by_hand = start_command(tmp_path)
    _write(tmp_path, f"{UNITS}/hutchd.service", "[Service]\nUser=coder\n")
    without_systemd = start_command(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)

    assert by_hand == "runuser -u hutch -- hutchd --system"
    assert without_systemd == "runuser -u coder -- hutchd --system"
    assert start_command(tmp_path) == "systemctl start hutchd"
