from __future__ import annotations

import json
import os
import plistlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hutch_client.__main__ import main
from hutch_client.commands.service import Place, install, look, uninstall
from hutch_shared.errors import HutchError, Reason
from hutch_shared.units import SERVICE, SOCKETS, launchd, seal_of, systemd
from tests.systemd import systemd_analyze

HUTCHD = os.path.join(sys.prefix, "bin", "hutchd")
NAMES = [SERVICE, *SOCKETS.values()]
ODD = {"HUTCH_CONFIG": '/a b%h/"x" \\.toml', "HUTCH_RUNTIME_DIR": "/r %n/x", "HUTCH_STATE_DIR": "/s$HOME"}
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
def place(tmp_path: Path, clean_environment: None) -> Place:
    """A place for one's own service on a host that systemd runs."""
    return Place(tmp_path / "user", systemd([HUTCHD], {}, system=False), HUTCHD, False, "systemd", here=True)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """A systemctl that writes down how it is called; given what it is to show, returns the calls so far."""
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


def _files(place: Place) -> list[str]:
    return sorted(path.name for path in place.folder.iterdir()) if place.folder.exists() else []


# ---------------------------------------------------------------- the texts


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("environ", [{}, ODD])
def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path, system: bool, environ: dict[str, str]) -> None:
    """Not even a warning, also where names have blanks, quotes, percent and dollar signs."""
    analyze = systemd_analyze()
    program = tmp_path / "a b%h$c" / "hutchd"
    program.parent.mkdir()
    program.symlink_to(HUTCHD)
    for name, text in systemd([str(program)], environ, system=system).items():
        (tmp_path / name).write_text(text)
    argv = [analyze, *([] if system else ["--user"]), "verify", *(str(tmp_path / name) for name in NAMES)]
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart_ends_no_executor_and_keeps_the_sockets() -> None:
    """In each of the units: only hutchd is killed, and its directory stays."""
    for system in (False, True):
        lines = systemd([HUTCHD], {}, system=system)[SERVICE].splitlines()

        assert {"KillMode=process", "OOMPolicy=continue", "RuntimeDirectoryPreserve=yes", "Delegate=yes"} <= {*lines}
        assert {"Type=notify", "LimitCORE=0", "UMask=0077", f"Sockets={' '.join(SOCKETS.values())}"} <= {*lines}


def test_nothing_in_the_units_takes_the_sandbox_from_agents() -> None:
    """They inherit what holds for hutchd: a mount over /proc, say, and bubblewrap can make none."""
    for system in (False, True):
        service = systemd([HUTCHD], {}, system=system)[SERVICE]
        settings = {line.split("=")[0] for line in service.splitlines() if "=" in line and line[0] != "#"}

        assert {name for name in settings if name.startswith(("Protect", "Private", "NoNew", "SystemCall"))} == set()
        assert not settings & {"RestrictNamespaces", "RestrictSUIDSGID", "MemoryDenyWriteExecute", "LockPersonality"}


def test_sockets_lie_where_hutch_looks_for_them() -> None:
    """By the same variables, which the service gets too; the names tell hutchd which is which."""
    usual = systemd([HUTCHD], {}, system=False)
    state = systemd([HUTCHD], {"HUTCH_STATE_DIR": "/s/"}, system=True)

    assert "ListenStream=%t/hutch/client.sock\nFileDescriptorName=client\n" in usual["hutchd.socket"]
    assert "ListenStream=%t/hutch/executor.sock\nFileDescriptorName=executor\n" in usual["hutchd-executor.socket"]
    assert "ListenStream=/s/run/client.sock\n" in state["hutchd.socket"]
    assert 'Environment="HUTCH_STATE_DIR=/s/"\n' in state[SERVICE]
    assert "RuntimeDirectory" not in state[SERVICE]
    assert "StateDirectory" not in state[SERVICE]


def test_launchd_reads_the_list(tmp_path: Path) -> None:
    """With each word as it is."""
    (text,) = launchd(["/a <b>/hutchd"], {"HUTCH_CONFIG": "/a&b.toml"}, system=True).values()
    read = plistlib.loads(text.encode())

    assert read["ProgramArguments"] == ["/a <b>/hutchd", "--system"]
    assert read["EnvironmentVariables"] == {"HUTCH_CONFIG": "/a&b.toml"}
    assert read["AbandonProcessGroup"] is True
    assert seal_of(text) == "whole"


@pytest.mark.parametrize("value", ["/a\nExecStartPre=/bin/x", "relative"])
def test_what_no_unit_can_hold_is_refused(value: str) -> None:
    """A line break in a path would be another setting."""
    with pytest.raises(HutchError) as refused:
        systemd([HUTCHD], {"HUTCH_STATE_DIR": value}, system=False)

    assert refused.value.reason is Reason.INVALID_PARAMS


# ---------------------------------------------------------------- install, uninstall, status


def test_install_writes_and_says_how_to_start(place: Place, manager: Systemd) -> None:
    """And does not start it; a second time changes nothing."""
    told = install(place)
    again = install(place)

    assert _files(place) == sorted(NAMES)
    assert "systemctl --user daemon-reload && systemctl --user enable --now hutchd.service hutchd.socket" in told[3]
    assert told[0].endswith("hutchd.service: written")
    assert again[0].endswith("hutchd.service: as it was")
    assert manager(NOTHING) == []
    assert look(place)["installed"] == "current"


def test_with_now_it_is_started_and_ended(place: Place, manager: Systemd) -> None:
    """In use it is not removed without."""
    install(place, now=True)
    manager(RUNS)
    with pytest.raises(HutchError, match="--now") as refused:
        uninstall(place)
    kept = _files(place)
    uninstall(place, now=True)

    assert manager(NOTHING) == [
        "--user daemon-reload",
        f"--user enable --now {' '.join(NAMES)}",
        f"--user disable --now {' '.join(NAMES)}",
        "--user daemon-reload",
    ]
    assert refused.value.reason is Reason.WRONG_STATE
    assert kept == sorted(NAMES)
    assert _files(place) == []


def test_a_file_that_a_person_changed_is_theirs(place: Place, manager: Systemd) -> None:
    """It is neither overwritten nor removed without --force, and nothing else is done then; so with a mask."""
    install(place)
    file = place.folder / SERVICE
    file.write_text(file.read_text().replace("WatchdogSec=60", "WatchdogSec=600"))
    mine = file.read_text()
    (place.folder / "hutchd.socket").unlink()
    for verb in (install, uninstall):
        with pytest.raises(HutchError, match=SERVICE) as refused:
            verb(place)
        assert refused.value.reason is Reason.CONFLICT
    kept, state, files = file.read_text(), look(place)["installed"], _files(place)
    install(place, force=True)

    assert kept == mine
    assert state == "changed"
    assert files == sorted({*NAMES} - {"hutchd.socket"})
    assert file.read_text() == place.texts[SERVICE]
    file.unlink()
    file.symlink_to(os.devnull)
    with pytest.raises(HutchError, match=SERVICE):
        install(place)


def test_what_another_version_wrote_is_brought_up_to_date(place: Place, manager: Systemd) -> None:
    """Its seal tells that nobody changed it."""
    install(place)
    texts = systemd(["/opt/hutch/bin/hutchd"], {}, system=False)
    newer = Place(place.folder, texts, HUTCHD, False, "systemd", here=True)
    before = look(newer)["installed"]
    install(newer)

    assert before == "older"
    assert look(newer)["installed"] == "current"


def test_status_tells_since_when_it_runs(place: Place, manager: Systemd) -> None:
    """As the manager says, and whether it waits for who connects."""
    install(place)
    manager(RUNS)
    running = look(place)
    manager(RUNS.replace("=active", "=inactive", 1))
    waiting = look(place)
    manager(RUNS.replace("=active", "=failed", 1))
    failed = look(place)

    assert (running["running"], running["enabled"], running["pid"], running["up"]) == (True, True, 42, True)
    assert running["since"].endswith("Z")
    assert (waiting["running"], waiting["listening"], waiting["since"], waiting["up"]) == (False, True, None, True)
    assert failed["trouble"] == "failed: hutchd.service"


def test_without_systemd_nothing_is_written(place: Place) -> None:
    """But said, and what could be done instead."""
    without = Place(place.folder, place.texts, HUTCHD, False, "systemd", here=False)
    with pytest.raises(HutchError, match="hutch daemon start"):
        install(without)

    assert _files(place) == []
    assert look(without)["running"] is None


def test_what_others_can_change_is_not_run_as_root(place: Place, tmp_path: Path) -> None:
    """And who is not root may not install it for the host at all."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    host = Place(place.folder, place.texts, str(tmp_path / "open" / "hutchd"), True, "systemd", here=True)
    with pytest.raises(HutchError, match=r"Root would run|Only root") as refused:
        install(host, force=True)

    assert refused.value.reason is Reason.NOT_ALLOWED
    assert _files(place) == []


def test_a_dry_run_prints_the_files(clean_environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On any host, and touches nothing; with the hutchd that belongs to this hutch."""
    assert main(["service", "install", "--user", "--dry-run", "-o", "json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert main(["service", "install", "--system", "--dry-run"]) == 0
    printed = capsys.readouterr().out

    assert [Path(path).name for path in files] == NAMES
    assert not any(Path(path).exists() for path in files)
    assert f'ExecStart="{os.path.realpath(sys.prefix)}/bin/hutchd" "--system"\n' in printed
    assert "==> /etc/systemd/system/hutchd.socket <==\n" in printed


def test_status_of_no_service_is_no_success(clean_environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts can ask; it touches nothing."""
    code = main(["service", "status", "--user", "-o", "json"])

    assert code == 3
    assert json.loads(capsys.readouterr().out)["installed"] == "absent"


def test_somebody_says_whose_service() -> None:
    """Neither is the default."""
    with pytest.raises(SystemExit) as refused:
        main(["service", "install"])

    assert refused.value.code == 2
