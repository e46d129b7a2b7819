"""The files of the service, as systemd and launchd read them."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from msgspec import convert

from hutch_client.install.units import (
    CREDENTIAL,
    DAEMON,
    LAUNCHER,
    SOCKETS,
    config_templates,
    credential_of,
    render_launchd,
    render_systemd,
    seal_of,
)
from hutch_daemon.doctor.launcher import LauncherConfig
from hutch_daemon.settings import Settings, parse
from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import LAUNCHER_SOCKET_UNIT
from tests.programs import systemd_analyze

HUTCHD = os.path.join(sys.prefix, "bin", "hutchd")
PLAIN = [os.path.realpath("/bin/true")]
NAMES = [DAEMON, *SOCKETS.values()]
HOSTS = [*NAMES, LAUNCHER, LAUNCHER_SOCKET_UNIT]
HUTCHD_SCORE = 2.0
LAUNCHER_SCORE = 8.0
"""systemd's rating of a service's exposure: from 0, none, to 10, complete."""
ODD = {"HUTCH_CONFIG": '/a b%h/"x" \\.toml', "HUTCH_RUNTIME_DIR": "/r %n/x", "HUTCH_STATE_DIR": "/s$HOME"}


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("environ", [{}, ODD])
def test_systemd_accepts_the_units(tmp_path: Path, system: bool, environ: dict[str, str]) -> None:
    """`systemd-analyze verify` prints no warning, even if names have blanks, quotes, percent and dollar signs."""
    analyze = systemd_analyze()
    program = tmp_path / "a b%h$c" / "hutchd"
    program.parent.mkdir()
    program.symlink_to(HUTCHD)
    credential = "/a b/%c.cred" if environ and system else None
    units = render_systemd([str(program)], environ, system=system, launcher=[str(program)], credential=credential)
    for name, text in units.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [name for name in units if name != CREDENTIAL]
    argv = [analyze, *([] if system else ["--user"]), "verify", *(str(tmp_path / name) for name in names)]
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)

    assert (done.returncode, done.stderr) == (0, "")
    assert names == (HOSTS if system else NAMES)
    assert (CREDENTIAL in units) is (credential is not None)


def test_hutchd_of_a_host_is_hardened(tmp_path: Path) -> None:
    """`systemd-analyze security` gives hutchd at most 2.0; the launcher, whose settings agents inherit, at most 8.0."""
    analyze = systemd_analyze()
    scores = {}
    for name, text in render_systemd(PLAIN, {}, system=True, launcher=PLAIN).items():
        (tmp_path / name).write_text(text)
    for name in (DAEMON, LAUNCHER):
        words = [analyze, "security", "--offline=true", "--no-pager", str(tmp_path / name)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        scores[name] = float(said.split(": ")[1].split()[0])
    print(f"systemd-analyze security: hutchd {scores[DAEMON]} (at most {HUTCHD_SCORE}),")
    print(f"  hutch-launcher {scores[LAUNCHER]} (at most {LAUNCHER_SCORE}): agents inherit what its unit sets, so it")
    print("  filters no system call, hides no part of the host, and only limits the capabilities")

    assert scores[DAEMON] <= HUTCHD_SCORE
    assert scores[LAUNCHER] <= LAUNCHER_SCORE


def test_a_restart_ends_no_executor_and_keeps_the_sockets() -> None:
    """Each unit stops only its main process and keeps its runtime directory."""
    host = render_systemd([HUTCHD], {}, system=True, launcher=PLAIN)
    for text in (render_systemd([HUTCHD], {}, system=False)[DAEMON], host[DAEMON], host[LAUNCHER]):
        lines = {*text.splitlines()}

        assert {"KillMode=process", "OOMPolicy=continue", "RuntimeDirectoryPreserve=yes", "LimitCORE=0"} <= lines
        assert ("Delegate=yes" in lines) is (text != host[DAEMON])
        assert {"Type=notify", f"Sockets={' '.join(SOCKETS.values())}"} <= lines or text == host[LAUNCHER]


def test_no_setting_takes_the_sandbox_from_agents() -> None:
    """Agents inherit the settings of their unit; with a mount over /proc, for example, bubblewrap fails."""
    launcher = render_systemd([HUTCHD], {}, system=True, launcher=PLAIN)[LAUNCHER]
    for text in (render_systemd([HUTCHD], {}, system=False)[DAEMON], launcher):
        settings = {line.split("=")[0] for line in text.splitlines() if "=" in line and line[0] != "#"}

        assert {
            name for name in settings if name.startswith(("Protect", "Private", "SystemCall", "IPAddress"))
        } == set()
        assert not settings & {"RestrictNamespaces", "RestrictSUIDSGID", "MemoryDenyWriteExecute", "LockPersonality"}
        assert not settings & {"RestrictAddressFamilies", "MemoryMax", "DeviceAllow", "DevicePolicy"}
        assert "NoNewPrivileges" not in settings or text == launcher


def test_hutchd_and_the_launcher_are_separate_services() -> None:
    """hutchd has an account and no privilege; the launcher has privileges and one client."""
    units = render_systemd([HUTCHD], {}, system=True, launcher=["/opt/h b/hutch-launcher"])
    newer = render_systemd([HUTCHD], {}, system=True, launcher=PLAIN, version=254)
    daemon, launcher = ({*units[name].splitlines()} for name in (DAEMON, LAUNCHER))

    assert {"User=hutch", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict"} <= daemon
    assert f"After=network-online.target {LAUNCHER_SOCKET_UNIT}" in daemon
    assert f"Wants=network-online.target {LAUNCHER_SOCKET_UNIT}" in daemon
    assert {'ExecStart="/opt/h b/hutch-launcher"', "TasksMax=infinity"} <= launcher
    assert not any(line.startswith(("User=", "DelegateSubgroup=")) for line in launcher)
    assert "DelegateSubgroup=launcher" in newer[LAUNCHER].splitlines()
    assert "SocketUser=hutch\nSocketMode=0600\n" in units[LAUNCHER_SOCKET_UNIT]


@pytest.mark.parametrize(
    ("environ", "program", "lines"),
    [
        ({}, "/opt/hutch/bin/hutchd", {"ProtectHome=yes", "PrivateTmp=yes", "StateDirectory=hutch"}),
        ({"HUTCH_STATE_DIR": "/home/x/s"}, "/opt/h", {"ProtectHome=read-only", 'ReadWritePaths="/home/x/s"'}),
        ({"HUTCH_RUNTIME_DIR": "/tmp/r"}, "/opt/h", {"ProtectHome=yes", 'ReadWritePaths="/tmp/r"'}),
        ({}, "/root/hutch/bin/hutchd", {"ProtectHome=read-only", "PrivateTmp=yes"}),
    ],
)
def test_hutchd_can_read_and_write_its_own_directories(environ: dict[str, str], program: str, lines: set[str]) -> None:
    """If its directories are below /home or /tmp, the unit opens these; otherwise hutchd could not start."""
    text = {*render_systemd([program], environ, system=True, launcher=PLAIN)[DAEMON].splitlines()}

    assert lines <= text
    assert ("PrivateTmp=yes" in text) is ("/tmp/r" not in environ.values())


def test_a_credential_is_a_drop_in_of_its_own() -> None:
    """So it stays when the unit is replaced. Without a credential there is no such drop-in."""
    without = render_systemd([HUTCHD], {}, system=True, launcher=PLAIN)
    sealed = render_systemd([HUTCHD], {}, system=True, launcher=PLAIN, credential="/etc/hutch/%k.cred")

    assert CREDENTIAL not in without
    assert sealed[DAEMON] == without[DAEMON]
    assert "[Service]\nLoadCredentialEncrypted=hutch-master-key:/etc/hutch/%%k.cred\n" in sealed[CREDENTIAL]
    assert credential_of(sealed[CREDENTIAL]) == "/etc/hutch/%k.cred"
    with pytest.raises(HutchError, match="absolute"):
        render_systemd([HUTCHD], {}, system=True, launcher=PLAIN, credential="k.cred")


def test_the_configuration_of_a_new_host_is_valid_and_allows_nobody() -> None:
    """Until the list names an account, none may run agents. Each commented setting is valid without its `#`."""
    listed, settings = config_templates().values()
    list_lines = [line.removeprefix("# ") for line in listed.splitlines() if " = " in line]
    lines = [line.removeprefix("# ") for line in settings.splitlines() if " = " in line or line.startswith("# [")]

    assert tomllib.loads(listed) == {"serve": "hutch", "users": [], "groups": []}
    assert convert(tomllib.loads("\n".join(list_lines)), LauncherConfig).users == ()
    assert parse(settings, "template", {}) == Settings()
    assert parse("\n".join(lines), "template", {}).isolation.require == "account"


def test_sockets_lie_where_hutch_looks_for_them() -> None:
    """Units and hutchd use the same variables, and the descriptor's name identifies the socket."""
    usual = render_systemd([HUTCHD], {}, system=False)
    state = render_systemd([HUTCHD], {"HUTCH_STATE_DIR": "/s/"}, system=True, launcher=PLAIN)

    assert "ListenStream=%t/hutch/client.sock\nFileDescriptorName=client\n" in usual["hutchd.socket"]
    assert "ListenStream=%t/hutch/executor.sock\nFileDescriptorName=executor\n" in usual["hutchd-executor.socket"]
    assert "ListenStream=/s/run/client.sock\n" in state["hutchd.socket"]
    assert 'Environment="HUTCH_STATE_DIR=/s/"\n' in state[DAEMON]
    assert "RuntimeDirectory" not in state[DAEMON]
    assert "StateDirectory" not in state[DAEMON]


def test_launchd_can_read_its_property_list(tmp_path: Path) -> None:
    """Each word of the command is unchanged."""
    (text,) = render_launchd(["/a <b>/hutchd"], {"HUTCH_CONFIG": "/a&b.toml"}, system=True).values()
    read = plistlib.loads(text.encode())

    assert read["ProgramArguments"] == ["/a <b>/hutchd", "--system"]
    assert read["EnvironmentVariables"] == {"HUTCH_CONFIG": "/a&b.toml"}
    assert read["AbandonProcessGroup"] is True
    assert seal_of(text) == "whole"


@pytest.mark.parametrize("value", ["/a\nExecStartPre=/bin/x", "relative"])
def test_a_path_that_no_unit_can_hold_is_refused(value: str) -> None:
    """A line break in a path would begin another setting."""
    with pytest.raises(HutchError) as refused:
        render_systemd([HUTCHD], {"HUTCH_STATE_DIR": value}, system=False)

    assert refused.value.reason is Reason.INVALID_PARAMS
