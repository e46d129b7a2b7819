from __future__ import annotations

import json
import os
import plistlib
import pwd
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import convert

from hutch_client.__main__ import main
from hutch_client.commands import service
from hutch_client.commands.service import Place, install, look, uninstall
from hutch_daemon.doctor.launcher import LauncherConfig
from hutch_daemon.settings import Settings, parse
from hutch_shared.errors import HutchError, Reason
from hutch_shared.units import LAUNCHER, LAUNCHER_SOCKET, SERVICE, SOCKETS, launchd, seal_of, systemd, templates
from tests.accounts import account
from tests.systemd import systemd_analyze

HUTCHD = os.path.join(sys.prefix, "bin", "hutchd")
PLAIN = [os.path.realpath("/bin/true")]
NAMES = [SERVICE, *SOCKETS.values()]
HOSTS = [*NAMES, LAUNCHER, LAUNCHER_SOCKET]
HUTCHD_SCORE = 2.0
LAUNCHER_SCORE = 8.0
"""systemd's figures for what a service could reach: 0 nothing, 10 everything."""
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
def mine(tmp_path: Path, clean_environment: None) -> Place:
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


def _files(mine: Place) -> list[str]:
    return sorted(path.name for path in mine.folder.iterdir()) if mine.folder.exists() else []


# ---------------------------------------------------------------- the texts


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("environ", [{}, ODD])
def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path, system: bool, environ: dict[str, str]) -> None:
    """Not even a warning, also where names have blanks, quotes, percent and dollar signs."""
    analyze = systemd_analyze()
    program = tmp_path / "a b%h$c" / "hutchd"
    program.parent.mkdir()
    program.symlink_to(HUTCHD)
    credential = "/a b/%c.cred" if environ else None
    units = systemd([str(program)], environ, system=system, launcher=[str(program)], credential=credential)
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    argv = [analyze, *([] if system else ["--user"]), "verify", *(str(tmp_path / name) for name in units)]
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)

    assert (done.returncode, done.stderr) == (0, "")
    assert list(units) == (HOSTS if system else NAMES)


def test_hutchd_of_a_host_is_shut_in(tmp_path: Path) -> None:
    """By systemd's own figures: hutchd and its broker as far as can be, the launcher by its capabilities alone."""
    analyze = systemd_analyze()
    scores = {}
    for name, text in systemd(PLAIN, {}, system=True, launcher=PLAIN).items():
        (tmp_path / name).write_text(text)
    for name in (SERVICE, LAUNCHER):
        words = [analyze, "security", "--offline=true", "--no-pager", str(tmp_path / name)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        scores[name] = float(said.split(": ")[1].split()[0])
    print(f"systemd-analyze security: hutchd {scores[SERVICE]} (at most {HUTCHD_SCORE}),")
    print(f"  hutch-launcher {scores[LAUNCHER]} (at most {LAUNCHER_SCORE}): agents inherit what its unit sets, so that")
    print("  it filters no call, hides no part of the host, and has but its capabilities taken away")

    assert scores[SERVICE] <= HUTCHD_SCORE
    assert scores[LAUNCHER] <= LAUNCHER_SCORE


def test_a_restart_ends_no_executor_and_keeps_the_sockets() -> None:
    """In each of the units: only their own process is killed, and its directory stays."""
    host = systemd([HUTCHD], {}, system=True, launcher=PLAIN)
    for text in (systemd([HUTCHD], {}, system=False)[SERVICE], host[SERVICE], host[LAUNCHER]):
        lines = {*text.splitlines()}

        assert {"KillMode=process", "OOMPolicy=continue", "RuntimeDirectoryPreserve=yes", "LimitCORE=0"} <= lines
        assert ("Delegate=yes" in lines) is (text != host[SERVICE])
        assert {"Type=notify", f"Sockets={' '.join(SOCKETS.values())}"} <= lines or text == host[LAUNCHER]


def test_nothing_in_the_units_takes_the_sandbox_from_agents() -> None:
    """They inherit what holds for their parent: a mount over /proc, say, and bubblewrap can make none."""
    launcher = systemd([HUTCHD], {}, system=True, launcher=PLAIN)[LAUNCHER]
    for text in (systemd([HUTCHD], {}, system=False)[SERVICE], launcher):
        settings = {line.split("=")[0] for line in text.splitlines() if "=" in line and line[0] != "#"}

        assert {
            name for name in settings if name.startswith(("Protect", "Private", "SystemCall", "IPAddress"))
        } == set()
        assert not settings & {"RestrictNamespaces", "RestrictSUIDSGID", "MemoryDenyWriteExecute", "LockPersonality"}
        assert not settings & {"RestrictAddressFamilies", "MemoryMax", "DeviceAllow", "DevicePolicy"}
        assert "NoNewPrivileges" not in settings or text == launcher


def test_a_host_has_its_daemon_apart_from_its_launcher() -> None:
    """Each with what it needs: hutchd an account and no right, the launcher rights and one client."""
    units = systemd([HUTCHD], {}, system=True, launcher=["/opt/h b/hutch-launcher"])
    newer = systemd([HUTCHD], {}, system=True, launcher=PLAIN, version=254)
    daemon, launcher = ({*units[name].splitlines()} for name in (SERVICE, LAUNCHER))

    assert {"User=hutch", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict"} <= daemon
    assert f"After=network-online.target {LAUNCHER_SOCKET}" in daemon
    assert f"Wants=network-online.target {LAUNCHER_SOCKET}" in daemon
    assert {'ExecStart="/opt/h b/hutch-launcher"', "TasksMax=infinity"} <= launcher
    assert not any(line.startswith(("User=", "DelegateSubgroup=")) for line in launcher)
    assert "DelegateSubgroup=launcher" in newer[LAUNCHER].splitlines()
    assert "SocketUser=hutch\nSocketMode=0600\n" in units[LAUNCHER_SOCKET]


@pytest.mark.parametrize(
    ("environ", "program", "lines"),
    [
        ({}, "/opt/hutch/bin/hutchd", {"ProtectHome=yes", "PrivateTmp=yes", "StateDirectory=hutch"}),
        ({"HUTCH_STATE_DIR": "/home/x/s"}, "/opt/h", {"ProtectHome=read-only", 'ReadWritePaths="/home/x/s"'}),
        ({"HUTCH_RUNTIME_DIR": "/tmp/r"}, "/opt/h", {"ProtectHome=yes", 'ReadWritePaths="/tmp/r"'}),
        ({}, "/root/hutch/bin/hutchd", {"ProtectHome=read-only", "PrivateTmp=yes"}),
    ],
)
def test_hutchd_sees_and_writes_its_own_places(environ: dict[str, str], program: str, lines: set[str]) -> None:
    """Wherever they were put: shut in, it could neither be started nor keep a record otherwise."""
    text = {*systemd([program], environ, system=True, launcher=PLAIN)[SERVICE].splitlines()}

    assert lines <= text
    assert ("PrivateTmp=yes" in text) is ("/tmp/r" not in environ.values())


def test_a_credential_is_opt_in() -> None:
    """Its line is a comment until a file is named."""
    without = systemd([HUTCHD], {}, system=True, launcher=PLAIN)[SERVICE]
    sealed = systemd([HUTCHD], {}, system=True, launcher=PLAIN, credential="/etc/hutch/%k.cred")[SERVICE]

    assert "\n# LoadCredentialEncrypted=hutch-master-key:" in without
    assert "\nLoadCredentialEncrypted=hutch-master-key:/etc/hutch/%%k.cred\n" in sealed
    with pytest.raises(HutchError, match="absolute"):
        systemd([HUTCHD], {}, system=True, launcher=PLAIN, credential="k.cred")


def test_the_templates_can_be_used_and_let_nobody_in() -> None:
    """Until somebody is named; what is a comment in them is a setting when it is none."""
    listed, settings = templates().values()
    list_lines = [line.removeprefix("# ") for line in listed.splitlines() if " = " in line]
    lines = [line.removeprefix("# ") for line in settings.splitlines() if " = " in line or line.startswith("# [")]

    assert tomllib.loads(listed) == {"serve": "hutch", "users": [], "groups": []}
    assert convert(tomllib.loads("\n".join(list_lines)), LauncherConfig).users == ()
    assert parse(settings, "template", {}) == Settings()
    assert parse("\n".join(lines), "template", {}).isolation.require == "account"


def test_sockets_lie_where_hutch_looks_for_them() -> None:
    """By the same variables, which the service gets too; the names tell hutchd which is which."""
    usual = systemd([HUTCHD], {}, system=False)
    state = systemd([HUTCHD], {"HUTCH_STATE_DIR": "/s/"}, system=True, launcher=PLAIN)

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


def test_install_writes_and_says_how_to_start(mine: Place, manager: Systemd) -> None:
    """And does not start it; a second time changes nothing."""
    told = install(mine)
    again = install(mine)

    assert _files(mine) == sorted(NAMES)
    assert "systemctl --user daemon-reload && systemctl --user enable --now hutchd.service hutchd.socket" in told[3]
    assert told[0].endswith("hutchd.service: written")
    assert again[0].endswith("hutchd.service: as it was")
    assert manager(NOTHING) == []
    assert look(mine)["installed"] == "current"


def test_with_now_it_is_started_and_ended(mine: Place, manager: Systemd) -> None:
    """In use it is not removed without."""
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


def test_a_file_that_a_person_changed_is_theirs(mine: Place, manager: Systemd) -> None:
    """It is neither overwritten nor removed without --force, and nothing else is done then; so with a mask."""
    install(mine)
    file = mine.folder / SERVICE
    file.write_text(file.read_text().replace("WatchdogSec=60", "WatchdogSec=600"))
    edited = file.read_text()
    (mine.folder / "hutchd.socket").unlink()
    for verb in (install, uninstall):
        with pytest.raises(HutchError, match=SERVICE) as refused:
            verb(mine)
        assert refused.value.reason is Reason.CONFLICT
    kept, state, files = file.read_text(), look(mine)["installed"], _files(mine)
    install(mine, force=True)

    assert kept == edited
    assert state == "changed"
    assert files == sorted({*NAMES} - {"hutchd.socket"})
    assert file.read_text() == mine.texts[SERVICE]
    file.unlink()
    file.symlink_to(os.devnull)
    with pytest.raises(HutchError, match=SERVICE):
        install(mine)


def test_what_another_version_wrote_is_brought_up_to_date(mine: Place, manager: Systemd) -> None:
    """Its seal tells that nobody changed it."""
    install(mine)
    texts = systemd(["/opt/hutch/bin/hutchd"], {}, system=False)
    newer = Place(mine.folder, texts, HUTCHD, False, "systemd", here=True)
    before = look(newer)["installed"]
    install(newer)

    assert before == "older"
    assert look(newer)["installed"] == "current"


def test_status_tells_since_when_it_runs(mine: Place, manager: Systemd) -> None:
    """As the manager says, and whether it waits for who connects."""
    install(mine)
    manager(RUNS)
    running = look(mine)
    manager(RUNS.replace("=active", "=inactive", 1))
    waiting = look(mine)
    manager(RUNS.replace("=active", "=failed", 1))
    failed = look(mine)

    assert (running["running"], running["enabled"], running["pid"], running["up"]) == (True, True, 42, True)
    assert running["since"].endswith("Z")
    assert (waiting["running"], waiting["listening"], waiting["since"], waiting["up"]) == (False, True, None, True)
    assert failed["trouble"] == "failed: hutchd.service"


def test_without_systemd_nothing_is_written(mine: Place) -> None:
    """But said, and what could be done instead."""
    without = Place(mine.folder, mine.texts, HUTCHD, False, "systemd", here=False)
    with pytest.raises(HutchError, match="hutch daemon start"):
        install(without)

    assert _files(mine) == []
    assert look(without)["running"] is None


def test_what_others_can_change_is_not_run_as_root(mine: Place, tmp_path: Path) -> None:
    """And who is not root may not install it for the host at all."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    host = Place(mine.folder, mine.texts, str(tmp_path / "open" / "hutchd"), True, "systemd", here=True)
    with pytest.raises(HutchError, match=r"Root would run|Only root") as refused:
        install(host, force=True)

    assert refused.value.reason is Reason.NOT_ALLOWED
    assert _files(mine) == []


def test_a_dry_run_prints_the_files(clean_environment: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On any host, and touches nothing; with the hutchd that belongs to this hutch."""
    assert main(["service", "install", "--user", "--dry-run", "-o", "json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert main(["service", "install", "--system", "--dry-run"]) == 0
    printed = capsys.readouterr().out

    assert [Path(path).name for path in files] == NAMES
    assert "==> /etc/hutch/launcher.toml <==\n" in printed
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


# ---------------------------------------------------------------- of a host


@pytest.fixture
def host(tmp_path: Path, clean_environment: None) -> Iterator[Place]:
    """A place for a host's service, with an account of the test's own for hutchd, which can run the program."""
    program = Path("/bin/true")
    with account("svc") as made:
        texts = systemd([str(program)], {}, system=True, launcher=PLAIN)
        configuration = {tmp_path / "etc" / Path(path).name: text for path, text in templates().items()}
        yield Place(
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
def test_installing_for_a_host_tells_each_file_and_what_is_next(host: Place, manager: Systemd) -> None:
    """Configuration is written once, root's; what a person wrote there stays."""
    told = install(host)
    listed = next(path for path in host.templates if path.name == "launcher.toml")
    written, mode = listed.read_text(), listed.stat().st_mode & 0o777
    listed.write_text('users = ["ann"]\n')
    again = install(host)
    removed = uninstall(host)

    assert _files(host) == []
    assert [line for line in told if "the one part with privileges" in line]
    assert [line for line in told if str(listed) in line] == [
        f"{listed}: written, for you to fill in (whose agents may run here: nobody's yet)"
    ]
    assert f"{listed}: yours, as it was" in again
    assert any("systemctl enable --now" in line and LAUNCHER_SOCKET in line for line in told)
    assert told[-1] == "`hutch doctor`, as root, tells what is missing."
    assert (written, mode) == (host.templates[listed], 0o644)
    assert listed.read_text() == 'users = ["ann"]\n'
    assert str(listed) in removed[-1]


@pytest.mark.system
def test_accounts_are_looked_at_and_never_made(host: Place, manager: Systemd) -> None:
    """Without hutchd's account nothing is written, and the command that makes it is told."""
    nobody = replace(host, account="hutch-of-nobody")
    with pytest.raises(HutchError) as refused:
        install(nobody)

    assert refused.value.reason is Reason.WRONG_STATE
    assert refused.value.message.endswith(
        "useradd --system --home-dir /var/lib/hutch --shell /usr/sbin/nologin hutch-of-nobody"
    )
    assert _files(host) == []
    with pytest.raises(KeyError):
        pwd.getpwnam("hutch-of-nobody")


@pytest.mark.system
@pytest.mark.parametrize("what", ["program", "directory", "credential"])
def test_what_hutchd_could_not_use_is_named(host: Place, manager: Systemd, tmp_path: Path, what: str) -> None:
    """A program behind a closed door, a directory of somebody else's, a credential that is not there."""
    closed = Path("/root") if not Path("/root").stat().st_mode & 0o005 else tmp_path
    program = closed / f"hutch-test-{os.getpid()}"
    program.write_text("")
    program.chmod(0o700)
    if what == "program":
        broken, named = replace(host, code=(program,)), f"cannot use {program}"
    elif what == "directory":
        broken, named = replace(host, owned=(tmp_path,)), f"install -d -o {host.account}"
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
def test_the_launcher_is_part_of_the_status(host: Place, manager: Systemd) -> None:
    """Whether it runs, waits for hutchd to ask, or cannot be reached."""
    install(host)
    runs = f"{RUNS}\nId={LAUNCHER}\nActiveState=active\nMainPID=77\n\nId={LAUNCHER_SOCKET}\nActiveState=active\n"
    manager(runs)
    running = look(host)["launcher"]
    manager(RUNS)
    absent = look(host)["launcher"]
    manager(runs.replace(f"Id={LAUNCHER}\nActiveState=active", f"Id={LAUNCHER}\nActiveState=failed"))
    failed = look(host)

    assert running == {"running": True, "listening": True, "pid": 77}
    assert absent == {"running": False, "listening": False, "pid": None}
    assert failed["trouble"] == f"failed: {LAUNCHER}"


def test_a_credential_stays_when_it_is_not_named_again(tmp_path: Path) -> None:
    """Else the next installation would take the master key away."""
    file = tmp_path / SERVICE
    text = systemd([HUTCHD], {}, system=True, launcher=PLAIN, credential="/etc/hutch/%k.cred")[SERVICE]
    file.write_text(text)

    assert service._credential_of(file) == "/etc/hutch/%k.cred"
    file.write_text(text.replace("%%k", "mine"))
    assert service._credential_of(file) is None
    assert service._credential_of(tmp_path / "absent") is None


def test_there_is_no_host_of_many_people_on_macos(tmp_path: Path) -> None:
    """It is refused with what there is instead."""
    texts = launchd([HUTCHD], {}, system=True)
    with pytest.raises(HutchError, match="--user"):
        install(Place(tmp_path, texts, HUTCHD, True, "launchd", here=True))

    assert list(tmp_path.iterdir()) == []
