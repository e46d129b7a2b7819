"""The trial of the sandbox, and the sandbox of a session according to its result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hutch_daemon.environments.sandbox_probe import PROBE_COMMAND, SandboxProbe, probe
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from tests.programs import bubblewrap

HOME = "/home/ada"
HOLDING = SandboxProbe("/bin/sh", "bubblewrap 0.8.0", ("/state",), ("/code",))
"""A program that takes the place of bubblewrap on hosts without it."""
NO_NETWORK = SandboxProbe("/bin/sh", unavailable_networks={"broker-only": "it is forbidden"})


async def test_a_working_sandbox_is_found_by_trying_it(tmp_path: Path) -> None:
    """The executor's own program tries the sandbox; the result contains bubblewrap's version."""
    program = bubblewrap()
    (tmp_path / "vault").write_text("secret")
    walls = await probe([str(tmp_path)], ["/code"])

    assert walls.program == program
    assert walls.why.startswith("bubblewrap ")
    assert (walls.hide, walls.show) == ((str(tmp_path),), ("/code",))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ((sys.executable, "-c", "print('the kernel forbids it')"), "(the kernel forbids it)"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "(exit code 3)"),
        (("/nowhere/executor",), "No such file"),
    ],
)
async def test_a_sandbox_that_does_not_work_has_a_reason(command: tuple[str, ...], why: str) -> None:
    """Every failure of the trial becomes a reason, never an exception."""
    bubblewrap()
    walls = await probe([], [], command=command)

    assert walls.program is None
    assert why in walls.why


async def test_a_path_behind_a_link_has_both_names(tmp_path: Path) -> None:
    """A session in a directory that contains the home or Hutch's files has no sandbox, even through a link."""
    bubblewrap()
    (tmp_path / "real" / "ada").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    walls = await probe([str(tmp_path / "link" / "ada")], [])

    assert walls.hide == (str(tmp_path / "link" / "ada"), str(tmp_path / "real" / "ada"))
    assert "lies in its working" in walls.spec_for(str(tmp_path / "real"), "/home/ada", SandboxSettings())[1]
    assert (
        "the home itself"
        in HOLDING.spec_for(str(tmp_path / "real"), str(tmp_path / "link" / "ada"), SandboxSettings())[1]
    )


async def test_without_bubblewrap_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason names the missing program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    walls = await probe([], [])

    assert walls.program is None
    assert "bwrap" in walls.why


def test_the_settings_add_to_what_a_session_gets() -> None:
    """`~/` means the account's home; Hutch's own files are always hidden."""
    chosen = SandboxSettings(home="hidden", show=("~/sdk", "/data"), write=("~/.m2",), hide=("~/sdk/keys",))
    spec, why = HOLDING.spec_for("/home/ada/project", HOME, chosen)

    assert spec == m.SandboxSpec(
        "/bin/sh",
        hide=("/state", "/home/ada/sdk/keys"),
        show=("/code", "/home/ada/sdk", "/data"),
        write=("/home/ada/.m2",),
        home="hidden",
    )
    assert why == ""


def test_an_unavailable_network_matters_only_to_sessions_that_require_it() -> None:
    """The network of the settings reaches the executor."""
    allowed = SandboxSettings(network="allow-list", allow=("example.com",))
    full, listed = (NO_NETWORK.spec_for("/home/ada/project", HOME, one)[0] for one in (SandboxSettings(), allowed))

    assert full is not None
    assert listed is not None
    assert (full.network, listed.network, listed.allow) == ("full", "allow-list", ("example.com",))


async def test_each_network_is_tried_and_failures_are_reported(tmp_path: Path) -> None:
    """The trial also works in an executor that hutch-launcher started; it reports forbidden networks."""
    bubblewrap()
    told = 'print(\'{"faults": {"allow-list": "it is forbidden"}}\')'
    found = [
        await probe([], [], command=one)
        for one in (PROBE_COMMAND, (*PROBE_COMMAND, "--no-new-privileges"), (sys.executable, "-c", told))
    ]

    assert [dict(walls.unavailable_networks) for walls in found] == [{}, {}, {"allow-list": "it is forbidden"}]


@pytest.mark.parametrize(
    ("walls", "cwd", "chosen", "why"),
    [
        (HOLDING, "/home/ada/project", SandboxSettings(mode="off"), 'mode = "off"'),
        (HOLDING, HOME, SandboxSettings(), "the home itself"),
        (HOLDING, "/home", SandboxSettings(), "the home itself"),
        (
            SandboxProbe("/bin/sh", "", ("/srv/app/.hutch",)),
            "/srv/app",
            SandboxSettings(),
            "/srv/app/.hutch lies in its working",
        ),
        (SandboxProbe(why="It is not installed."), "/home/ada/project", SandboxSettings(), "not installed"),
        (SandboxProbe("/nowhere/bwrap"), "/home/ada/project", SandboxSettings(), "is gone now"),
        (SandboxProbe("/etc/passwd"), "/home/ada/project", SandboxSettings(), "may not be run any more"),
        (
            NO_NETWORK,
            "/home/ada/project",
            SandboxSettings(network="broker-only"),
            'network = "broker-only" does not work here (it is forbidden)',
        ),
    ],
)
def test_a_session_without_a_sandbox_has_a_reason(
    walls: SandboxProbe, cwd: str, chosen: SandboxSettings, why: str
) -> None:
    """The reason is one sentence."""
    spec, said = walls.spec_for(cwd, HOME, chosen)

    assert spec is None
    assert why in said
