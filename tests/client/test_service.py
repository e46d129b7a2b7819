"""`hutch service`: the files that it installs, removes and shows, with a systemctl that only records its calls."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hutch_client.__main__ import main
from hutch_client.commands.service import install, uninstall
from hutch_client.install.place import UnitPlace, installed_credential
from hutch_client.install.plan import Plan
from hutch_client.install.status import read_status
from hutch_client.install.units import (
    CREDENTIAL,
    DAEMON,
    LAUNCHER,
    SOCKETS,
    config_templates,
    render_launchd,
    render_systemd,
)
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import LAUNCHER_SOCKET_UNIT
from tests.accounts import account

HUTCHD = os.path.join(sys.prefix, "bin", "hutchd")
PLAIN = [os.path.realpath("/bin/true")]
NAMES = [DAEMON, *SOCKETS.values()]
BEFORE = Path(__file__).with_name("installed_before")
"""The files of the version before drop-ins, for /opt/hutch/bin/hutchd."""
SYSTEMCTL = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in *show*) cat "{answer}" ;; esac
"""
NOTHING = "".join(f"Id={name}\nActiveState=inactive\nUnitFileState=disabled\nMainPID=0\n\n" for name in NAMES)
RUNS = (
    "Id=hutchd.service\nActiveState=active\nUnitFileState=enabled\nMainPID=42\nActiveEnterTimestampMonotonic=1\n\n"
    "Id=hutchd.socket\nActiveState=active\nUnitFileState=enabled\n\n"
    "Id=hutchd-executor.socket\nActiveState=active\nUnitFileState=enabled\n"
)

Systemd = Callable[[str], list[str]]


@pytest.fixture
def mine(tmp_path: Path, clean_environment: None) -> UnitPlace:
    """A place for a user's own service, on a host with systemd."""
    return UnitPlace(tmp_path / "user", render_systemd([HUTCHD], {}, system=False), HUTCHD, False, "systemd", here=True)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """A systemctl that records its calls.

    It takes the output of `show` from now on, and returns the other calls so far.
    """
    log, answer = tmp_path / "calls", tmp_path / "answer"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.write_text(SYSTEMCTL.format(log=log, answer=answer))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HUTCH_RUNTIME_DIR", str(tmp_path / "no sockets"))
    log.touch()

    def shows(text: str) -> list[str]:
        answer.write_text(text)
        return [line for line in log.read_text().splitlines() if " show " not in line]

    shows(NOTHING)
    return shows


def _status(place: UnitPlace) -> dict[str, Any]:
    return read_status(place).as_json()


def _sentences(plan: Plan) -> list[str]:
    return [*map(str, plan.steps), *plan.sentences]


def _files(place: UnitPlace) -> list[str]:
    files = (path for path in place.folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(str(path.relative_to(place.folder)) for path in files)


def _lay_out(place: UnitPlace, before: str) -> None:
    """Write the files of the version before drop-ins."""
    place.folder.mkdir()
    for path in (BEFORE / before).iterdir():
        (place.folder / path.name).write_text(path.read_text())


def test_install_writes_the_units_and_says_how_to_start(mine: UnitPlace, manager: Systemd) -> None:
    """The command does not start hutchd; a second installation changes nothing."""
    first = _sentences(install(mine))
    second = _sentences(install(mine))

    assert _files(mine) == sorted(NAMES)
    assert "systemctl --user daemon-reload && systemctl --user enable --now hutchd.service hutchd.socket" in first[3]
    assert first[0].endswith("hutchd.service: written")
    assert second[0].endswith("hutchd.service: unchanged")
    assert manager(NOTHING) == []
    assert _status(mine)["installed"] == "current"


def test_with_now_the_service_is_started_and_stopped(mine: UnitPlace, manager: Systemd) -> None:
    """A service in use is removed only with `--now`."""
    install(mine, now=True)
    manager(RUNS)
    with pytest.raises(HutchError, match="--now") as refused:
        uninstall(mine)
    kept = _files(mine)
    uninstall(mine, now=True)

    assert manager(NOTHING) == [
        "--user daemon-reload",
        f"--user enable --now {' '.join(NAMES)}",
        f"--user disable --now {' '.join(NAMES)}",
        "--user daemon-reload",
    ]
    assert refused.value.reason is Reason.WRONG_STATE
    assert kept == sorted(NAMES)
    assert _files(mine) == []


def test_a_users_drop_in_survives_upgrade_and_removal(mine: UnitPlace, manager: Systemd) -> None:
    """A drop-in that `systemctl edit` wrote is shown and never changed, not even with --force."""
    install(mine)
    drop_in = mine.folder / f"{DAEMON}.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=600\n")
    newer = replace(mine, texts=render_systemd(["/opt/hutch/bin/hutchd"], {}, system=False))
    install(newer, force=True)
    shown = _status(newer)
    removed = uninstall(newer, force=True)

    assert shown["installed"] == "current"
    assert shown["drop_ins"] == [str(drop_in)]
    assert removed.sentences == (f"Kept: {drop_in}",)
    assert drop_in.read_text() == "[Service]\nWatchdogSec=600\n"


def test_an_edited_unit_is_replaced_and_its_edits_move_into_a_drop_in(mine: UnitPlace, manager: Systemd) -> None:
    """The drop-in then belongs to the user; removing an edited unit needs --force."""
    install(mine)
    unit = mine.folder / DAEMON
    unit.write_text(unit.read_text().replace("WatchdogSec=60", "WatchdogSec=600"))
    (mine.folder / "hutchd.socket").unlink()
    state = _status(mine)["installed"]
    with pytest.raises(HutchError, match=DAEMON) as refused:
        uninstall(mine)
    install(mine)
    drop_in = mine.folder / f"{DAEMON}.d" / "50-edited.conf"

    assert refused.value.reason is Reason.CONFLICT
    assert state == "changed"
    assert unit.read_text() == mine.texts[DAEMON]
    assert drop_in.read_text().splitlines()[1:] == ["[Service]", "WatchdogSec=600"]
    assert _files(mine) == sorted([*NAMES, f"{DAEMON}.d/50-edited.conf"])
    assert _status(mine)["installed"] == "current"
    unit.write_text(unit.read_text().replace("WatchdogSec=60", "WatchdogSec=6"))
    install(mine)
    assert drop_in.with_name("50-edited-2.conf").read_text().splitlines()[1:] == ["[Service]", "WatchdogSec=6"]


@pytest.mark.parametrize("how", ["mask", "own"])
def test_a_file_that_is_not_from_hutch_is_neither_overwritten_nor_removed(
    mine: UnitPlace, manager: Systemd, how: str
) -> None:
    """A masked unit or one of another program: without --force nothing at all is written."""
    mine.folder.mkdir()
    unit = mine.folder / DAEMON
    if how == "mask":
        unit.symlink_to(os.devnull)
    else:
        unit.write_text("[Service]\nExecStart=/bin/true\n")
    for verb in (install, uninstall):
        with pytest.raises(HutchError, match=DAEMON) as refused:
            verb(mine)
        assert refused.value.reason is Reason.CONFLICT
    files = _files(mine)
    install(mine, force=True)

    assert files == [DAEMON]
    assert unit.read_text() == mine.texts[DAEMON]
    assert not unit.is_symlink()


def test_the_files_of_the_version_before_are_taken_over(mine: UnitPlace, manager: Systemd) -> None:
    """Their seals show that nobody edited them, so they are replaced and no other file remains."""
    _lay_out(mine, "user")
    before = _status(mine)["installed"]
    install(mine)

    assert before == "older"
    assert _files(mine) == sorted(NAMES)
    assert _status(mine)["installed"] == "current"


def test_edited_files_of_the_version_before_are_taken_over(mine: UnitPlace, manager: Systemd) -> None:
    """Changed, added and removed settings go into drop-ins; the program is that of the new installation."""
    _lay_out(mine, "user")
    unit, socket = mine.folder / DAEMON, mine.folder / "hutchd.socket"
    text = unit.read_text().replace("LimitNOFILE=65536", 'LimitNOFILE=9999\nEnvironment="PATH=/opt/x:/usr/bin"')
    unit.write_text(text.replace("RestartSec=1\n", "").replace("Delegate=yes\n", ""))
    socket.write_text(socket.read_text().replace("Backlog=1024", "Backlog=16"))
    plan = install(mine)

    assert unit.read_text() == mine.texts[DAEMON]
    assert (mine.folder / f"{DAEMON}.d" / "50-edited.conf").read_text().splitlines()[1:] == [
        "[Service]",
        "LimitNOFILE=9999",
        'Environment="PATH=/opt/x:/usr/bin"',
        "Delegate=no",
    ]
    assert (mine.folder / "hutchd.socket.d" / "50-edited.conf").read_text().splitlines()[1:] == [
        "[Socket]",
        "Backlog=16",
    ]
    assert "RestartSec" in plan.sentences[0]
    assert (mine.folder / f"{DAEMON}.edited").read_text().count("LimitNOFILE=9999") == 1
    assert _status(mine)["installed"] == "current"


@pytest.mark.parametrize("edited", [False, True])
def test_the_credential_of_the_version_before_is_taken_over(tmp_path: Path, edited: bool) -> None:
    """The old unit names it; without it hutchd could not open its stored keys."""
    text = (BEFORE / "system-credential" / DAEMON).read_text()
    (tmp_path / DAEMON).write_text(text.replace("WatchdogSec=60", "WatchdogSec=9") if edited else text)
    found = installed_credential(tmp_path)

    assert found == "/etc/hutch/%k.cred"
    (tmp_path / CREDENTIAL).parent.mkdir()
    (tmp_path / CREDENTIAL).write_text("[Service]\nLoadCredentialEncrypted=hutch-master-key:/other.cred\n")
    assert installed_credential(tmp_path) == "/other.cred"
    (tmp_path / CREDENTIAL).unlink()
    (tmp_path / DAEMON).unlink()
    assert installed_credential(tmp_path) is None


def test_the_files_of_another_version_are_updated(mine: UnitPlace, manager: Systemd) -> None:
    """Their seals show that nobody edited them."""
    install(mine)
    newer = replace(mine, texts=render_systemd(["/opt/hutch/bin/hutchd"], {}, system=False))
    before = _status(newer)["installed"]
    install(newer)

    assert before == "older"
    assert _status(newer)["installed"] == "current"


def test_status_shows_since_when_it_runs(mine: UnitPlace, manager: Systemd) -> None:
    """It shows the manager's report, and whether the sockets wait for a first client."""
    install(mine)
    manager(RUNS)
    running = _status(mine)
    manager(RUNS.replace("=active", "=inactive", 1))
    waiting = _status(mine)
    manager(RUNS.replace("=active", "=failed", 1))
    failed = _status(mine)

    assert (running["running"], running["enabled"], running["pid"], running["up"]) == (True, True, 42, True)
    assert running["since"].endswith("Z")
    assert (waiting["running"], waiting["listening"], waiting["since"], waiting["up"]) == (False, True, None, True)
    assert failed["trouble"] == "failed: hutchd.service"


def test_without_systemd_nothing_is_written(mine: UnitPlace) -> None:
    """The error names the command that starts hutchd without a service."""
    without = replace(mine, here=False)
    with pytest.raises(HutchError, match="hutch daemon start"):
        install(without)

    assert _files(mine) == []
    assert _status(without)["running"] is None


def test_a_program_that_others_can_change_does_not_run_as_root(mine: UnitPlace, tmp_path: Path) -> None:
    """Only root can install for the host, and only programs that no other account can change."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    host = replace(mine, program=str(tmp_path / "open" / "hutchd"), system=True)
    with pytest.raises(HutchError, match=r"Root would run|Only root") as refused:
        install(host, force=True)

    assert refused.value.reason is Reason.NOT_ALLOWED
    assert _files(mine) == []


def test_a_dry_run_prints_the_plan(clean_environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the checks, the files, the commands and the problems, on any host, and changes nothing."""
    assert main(["service", "install", "--user", "--dry-run", "--now", "-o", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["service", "install", "--system", "--dry-run"]) == 0
    printed = capsys.readouterr().out

    assert [Path(path).name for path in plan["files"]] == NAMES
    assert plan["commands"] == [
        ["systemctl", "--user", "daemon-reload"],
        ["systemctl", "--user", "enable", "--now", *NAMES],
    ]
    assert [step["step"] for step in plan["steps"]] == ["write", "write", "write", "run", "run"]
    assert plan["checks"] == ["no hutchd runs outside the service"]
    assert not any(Path(path).exists() for path in plan["files"])
    assert "check: root runs this command\n" in printed
    assert "==> /etc/hutch/launcher.toml <==\n" in printed
    assert f'ExecStart="{os.path.realpath(sys.prefix)}/bin/hutchd" "--system"\n' in printed
    assert "==> /etc/systemd/system/hutchd.socket <==\n" in printed


def test_a_dry_run_of_the_removal_prints_its_plan(clean_environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints each file and the command for the manager, and removes nothing."""
    folder = Path.home() / ".config" / "systemd" / "user"
    folder.mkdir(parents=True)
    for path in (BEFORE / "user").iterdir():
        (folder / path.name).write_text(path.read_text())
    assert main(["service", "uninstall", "--user", "--dry-run"]) == 0

    assert f"remove: {folder / DAEMON}\n" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)


def test_the_status_without_a_service_is_no_success(
    clean_environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 3, so that scripts can check it; nothing is changed."""
    code = main(["service", "status", "--user", "-o", "json"])

    assert code == 3
    assert json.loads(capsys.readouterr().out)["installed"] == "absent"


def test_the_caller_says_whose_service() -> None:
    """Neither --user nor --system is a default."""
    with pytest.raises(SystemExit) as refused:
        main(["service", "install"])

    assert refused.value.code == 2


# ---------------------------------------------------------------- a host's service


@pytest.fixture
def host(tmp_path: Path, clean_environment: None) -> Iterator[UnitPlace]:
    """A place for a host's service, with a new account for hutchd, which can run the program."""
    program = Path("/bin/true")
    with account("svc") as made:
        texts = render_systemd([str(program)], {}, system=True, launcher=PLAIN)
        configuration = {tmp_path / "etc" / Path(path).name: text for path, text in config_templates().items()}
        yield UnitPlace(
            tmp_path / "system",
            texts,
            str(program),
            True,
            "systemd",
            here=True,
            templates=configuration,
            account=made.name,
        )


@pytest.mark.system
def test_installing_for_a_host_explains_each_file_and_the_next_step(host: UnitPlace, manager: Systemd) -> None:
    """Configuration is written once and belongs to root; an administrator's changes stay."""
    first = _sentences(install(host))
    listed = next(path for path in host.templates if path.name == "launcher.toml")
    written, mode = listed.read_text(), listed.stat().st_mode & 0o777
    listed.write_text('users = ["ann"]\n')
    second = _sentences(install(host))
    removed = uninstall(host)

    assert _files(host) == []
    assert [line for line in first if "the only privileged part" in line]
    assert [line for line in first if str(listed) in line] == [
        f"{listed}: written, for you to fill in (the accounts whose agents may run; empty so far)"
    ]
    assert f"{listed}: yours, unchanged" in second
    assert any("systemctl enable --now" in line and LAUNCHER_SOCKET_UNIT in line for line in first)
    assert first[-1] == "`hutch doctor`, as root, reports what is missing."
    assert (written, mode) == (host.templates[listed], 0o644)
    assert listed.read_text() == 'users = ["ann"]\n'
    assert str(listed) in removed.sentences[-1]


@pytest.mark.system
def test_a_credential_survives_the_next_installation(host: UnitPlace, manager: Systemd, tmp_path: Path) -> None:
    """The drop-in of the credential belongs to Hutch until a user edits it, and then to the user."""
    sealed = tmp_path / "k.cred"
    sealed.touch()
    texts = render_systemd([host.program], {}, system=True, launcher=PLAIN, credential=str(sealed))
    with_key = replace(host, texts=texts, credential=sealed)
    install(with_key)
    drop_in = host.folder / CREDENTIAL
    edited = drop_in.read_text().replace("[Service]\n", "[Service]\nWatchdogSec=9\n")
    drop_in.write_text(edited)
    install(with_key)
    other = replace(with_key, texts=render_systemd([host.program], {}, system=True, launcher=PLAIN, credential="/o"))
    with pytest.raises(HutchError, match=r"master-key\.conf") as refused:
        install(replace(other, credential=sealed))

    assert installed_credential(host.folder) == str(sealed)
    assert drop_in.read_text() == edited
    assert refused.value.reason is Reason.CONFLICT
    assert CREDENTIAL not in with_key.units


@pytest.mark.system
def test_accounts_are_not_created(host: UnitPlace, manager: Systemd) -> None:
    """Without hutchd's account nothing is written; the error has the command that creates the account."""
    missing = replace(host, account="hutch-of-nobody")
    with pytest.raises(HutchError) as refused:
        install(missing)

    assert refused.value.reason is Reason.WRONG_STATE
    assert refused.value.message.endswith(
        "useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin hutch-of-nobody"
    )
    assert _files(host) == []
    with pytest.raises(KeyError):
        pwd.getpwnam("hutch-of-nobody")


@pytest.mark.system
@pytest.mark.parametrize("what", ["program", "directory", "credential"])
def test_the_error_names_what_hutchd_could_not_use(
    host: UnitPlace, manager: Systemd, tmp_path: Path, what: str
) -> None:
    """Examples: a program in a closed directory, a directory of another account, a missing credential."""
    closed = Path("/root") if not Path("/root").stat().st_mode & 0o005 else tmp_path
    program = closed / f"hutch-test-{os.getpid()}"
    program.write_text("")
    program.chmod(0o700)
    if what == "program":
        broken, named = replace(host, code=(program,)), f"cannot use {program}"
    elif what == "directory":
        broken, named = replace(host, owned=((tmp_path, "0700"),)), f"install -d -o {host.account}"
    else:
        broken, named = replace(host, credential=tmp_path / "x.cred"), "systemd-creds encrypt --name=hutch-master-key"
    try:
        with pytest.raises(HutchError) as refused:
            install(broken)
    finally:
        program.unlink()

    assert named in refused.value.message
    assert _files(host) == []


@pytest.mark.system
def test_the_launcher_is_part_of_the_status(host: UnitPlace, manager: Systemd) -> None:
    """The status shows whether it runs, waits for hutchd, or cannot be reached."""
    install(host)
    runs = f"{RUNS}\nId={LAUNCHER}\nActiveState=active\nMainPID=77\n\nId={LAUNCHER_SOCKET_UNIT}\nActiveState=active\n"
    manager(runs)
    running = _status(host)["launcher"]
    manager(RUNS)
    absent = _status(host)["launcher"]
    manager(runs.replace(f"Id={LAUNCHER}\nActiveState=active", f"Id={LAUNCHER}\nActiveState=failed"))
    failed = _status(host)

    assert running == {"running": True, "listening": True, "pid": 77}
    assert absent == {"running": False, "listening": False, "pid": None}
    assert failed["trouble"] == f"failed: {LAUNCHER}"


@pytest.mark.system
def test_the_host_files_of_the_version_before_are_taken_over(host: UnitPlace, manager: Systemd) -> None:
    """Directories that an administrator opened and protections that one switched off stay so."""
    _lay_out(host, "system")
    unit = host.folder / DAEMON
    text = unit.read_text().replace("ProtectHome=yes", "ProtectHome=read-only\nReadWritePaths=/backup")
    text = text.replace("SystemCallFilter=~@privileged @resources\n", "").replace("MemoryDenyWriteExecute=yes\n", "")
    unit.write_text(text)
    install(host)

    assert (host.folder / f"{DAEMON}.d" / "50-edited.conf").read_text().splitlines()[1:] == [
        "[Service]",
        "ProtectHome=read-only",
        "ReadWritePaths=",
        "ReadWritePaths=/backup",
        "SystemCallFilter=",
        "SystemCallFilter=@system-service",
        "MemoryDenyWriteExecute=no",
    ]


def test_a_host_with_many_users_needs_linux(tmp_path: Path) -> None:
    """On macOS --system is refused, and the error names --user."""
    texts = render_launchd([HUTCHD], {}, system=True)
    with pytest.raises(HutchError, match="--user"):
        install(UnitPlace(tmp_path, texts, HUTCHD, True, "launchd", here=True))

    assert list(tmp_path.iterdir()) == []


def test_an_edited_property_list_needs_force(tmp_path: Path, clean_environment: None) -> None:
    """launchd has no drop-ins that could keep the edits."""
    mine = UnitPlace(tmp_path, render_launchd([HUTCHD], {}, system=False), HUTCHD, False, "launchd", here=True)
    (name,) = mine.texts
    (tmp_path / name).write_text((BEFORE / "launchd" / name).read_text())
    before = _status(mine)["installed"]
    install(mine)
    (tmp_path / name).write_text(mine.texts[name].replace("63", "18"))
    with pytest.raises(HutchError, match="--force") as refused:
        install(mine)

    assert before == "older"
    assert refused.value.reason is Reason.CONFLICT
