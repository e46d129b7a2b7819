"""Whether there can be walls around agents is tried once, and what follows for a session is decided here."""

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
"""Whatever may be run stands for bubblewrap where it is not."""
NO_NETWORK = SandboxProbe("/bin/sh", unavailable_networks={"broker-only": "it is forbidden"})


async def test_walls_that_hold_are_found_by_putting_them_up(tmp_path: Path) -> None:
    """The executor's own program tries them; their version is what is said of them."""
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
async def test_walls_that_do_not_hold_say_why(command: tuple[str, ...], why: str) -> None:
    """Whatever goes wrong in the trial is a reason, never an error."""
    bubblewrap()
    walls = await probe([], [], command=command)

    assert walls.program is None
    assert why in walls.why


async def test_what_lies_behind_a_link_is_known_by_both_names(tmp_path: Path) -> None:
    """A session in what contains the home, or what is Hutch's, has no walls whatever it is called."""
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


async def test_without_bubblewrap_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And it is said which program is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    walls = await probe([], [])

    assert walls.program is None
    assert "bwrap" in walls.why


def test_the_settings_add_to_what_a_session_gets() -> None:
    """Paths below the account's home are written with `~/`; what is Hutch's is hidden in any case."""
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


def test_a_network_that_cannot_be_had_stands_in_nobodys_way_who_did_not_ask_for_it() -> None:
    """What is asked for reaches the executor."""
    allowed = SandboxSettings(network="allow-list", allow=("example.com",))
    full, listed = (NO_NETWORK.spec_for("/home/ada/project", HOME, one)[0] for one in (SandboxSettings(), allowed))

    assert full is not None
    assert listed is not None
    assert (full.network, listed.network, listed.allow) == ("full", "allow-list", ("example.com",))


async def test_each_network_is_tried_and_what_fails_is_told(tmp_path: Path) -> None:
    """Also as an executor has it that hutch-launcher started; another trial says which network this host forbids."""
    bubblewrap()
    told = 'print(\'{"allow-list": "it is forbidden"}\')'
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
            'network = "broker-only" here (it is forbidden)',
        ),
    ],
)
def test_a_session_without_walls_says_why(walls: SandboxProbe, cwd: str, chosen: SandboxSettings, why: str) -> None:
    """One sentence."""
    spec, said = walls.spec_for(cwd, HOME, chosen)

    assert spec is None
    assert why in said
