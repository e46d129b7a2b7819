"""The trial of each kind of sandbox, when it is repeated, and the sandbox of a session according to its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_daemon.environments import sandbox_probe
from hutch_daemon.environments.sandbox_probe import (
    PROBE_COMMAND,
    KindTrial,
    ProgramIdentity,
    SandboxProbe,
    SandboxProber,
    kinds_of,
    read_trial,
    try_here,
)
from hutch_daemon.environments.user_namespaces import closed_by, kernel_settings
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from tests.programs import bubblewrap

HOME, CWD = "/home/ada", "/home/ada/project"
AUTO, REQUIRED = SandboxSettings(), SandboxSettings(mode="require")
ANY, LANDLOCK = SandboxSettings(mode="require", kind="any"), SandboxSettings(kind="landlock")
LIMITED = SandboxSettings(network="broker-only")
PROGRAM = ProgramIdentity("/usr/bin/bwrap", (1, 2, 3, 4, 5))
HOLDING = KindTrial("bubblewrap", program=PROGRAM, version="bubblewrap 0.8.0")
BROKEN = KindTrial("bubblewrap", {"full": "it is broken"}, PROGRAM, remedy="mend it")
MISSING = KindTrial("bubblewrap", remedy="install it")
LOCKED = KindTrial("landlock", {"allow-list": "it has no proxy"}, abi=7)
NO_LANDLOCK = KindTrial("landlock", {"full": "the kernel has none"})


def probed(bubblewrap: KindTrial | None, landlock: KindTrial | None = None, **more: Any) -> SandboxProbe:
    """Return a result with Hutch's own places in it."""
    return SandboxProbe(bubblewrap, landlock, ("/state",), ("/code",), **more)


class Host:
    """A bubblewrap of the test's own on PATH, and the trials that were run, which hold as the test says."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "bwrap"
        self.tried: list[str] = []
        self.faults: dict[str, dict[str, str]] = {"bubblewrap": {}, "landlock": {"full": "the kernel has none"}}
        self.during: Callable[[], None] = lambda: None
        """What happens during each trial."""
        self.now = 1000.0
        self.prober = SandboxProber((["/state"], ["/code"]), self.run, clock=lambda: self.now)

    def install(self, text: str = "#!/bin/sh\necho bubblewrap 1\n") -> None:
        """Put another file in the place of bubblewrap."""
        fresh = self.program.with_name("fresh")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.rename(self.program)

    async def run(self, spec: m.SandboxSpec) -> str:
        """Try a sandbox."""
        self.tried.append(spec.kind)
        await anyio.lowlevel.checkpoint()
        self.during()
        return msgspec.json.encode(m.SandboxTrial(self.faults[spec.kind], 7)).decode()

    async def kind(self, settings: SandboxSettings = AUTO) -> str | None:
        """Return the kind that a session would get now."""
        spec = (await self.prober.probe(settings)).choose(CWD, HOME, settings).spec
        return None if spec is None else spec.kind


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host with a bubblewrap that holds, and without Landlock."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    host = Host(tmp_path)
    host.install()
    return host


# ------------------------------------------------------------ trials


async def test_a_working_sandbox_is_found_by_trying_it(tmp_path: Path) -> None:
    """The executor's own program tries the sandbox; the result contains bubblewrap's path, identity and version."""
    program = bubblewrap()
    (tmp_path / "vault").write_text("secret")
    found = await SandboxProber(([str(tmp_path)], ["/code"]), try_here).probe(AUTO)

    assert found.bubblewrap is not None
    assert found.bubblewrap.program is not None
    assert (found.bubblewrap.program.path, found.bubblewrap.program.file[1]) == (program, os.stat(program).st_ino)
    assert found.bubblewrap.named.startswith("bubblewrap ")
    assert (found.landlock, found.hide, found.show) == (None, (str(tmp_path),), ("/code",))


@pytest.mark.parametrize("command", [PROBE_COMMAND, (*PROBE_COMMAND, "--no-new-privileges")])
async def test_each_network_is_tried(command: tuple[str, ...]) -> None:
    """The trial also works in an executor that hutch-launcher started."""
    bubblewrap()
    found = await SandboxProber(([], []), partial(try_here, command=command)).probe(AUTO)

    assert found.bubblewrap is not None
    assert dict(found.bubblewrap.faults) == {}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ((sys.executable, "-c", "print('the kernel forbids it')"), "(the kernel forbids it)"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "(exit code 3)"),
        (("/nowhere/executor",), "No such file"),
    ],
)
async def test_a_sandbox_that_does_not_work_has_a_reason(host: Host, command: tuple[str, ...], why: str) -> None:
    """Every failure of the trial becomes a reason, never an exception."""
    found = await SandboxProber(([], []), partial(try_here, command=command)).probe(AUTO)
    choice = found.choose(CWD, HOME, AUTO)

    assert choice.spec is None
    assert why in choice.why


def test_only_a_trial_is_a_trial() -> None:
    """What an executor of an earlier version prints, or nothing at all, is no sandbox."""
    said = [read_trial(text).faults for text in (b'{"faults": {}}', b"{}", b"[]", b"", "Traceback.", b"\xff")]

    assert [bool(faults) for faults in said] == [False, False, True, True, True, True]


async def test_landlock_is_tried_only_where_it_is_needed(host: Host) -> None:
    """Nothing is tried that the settings exclude, or without a sandbox."""
    for settings in (SandboxSettings(mode="off"), AUTO, REQUIRED, ANY):
        await host.prober.probe(settings)
    only_bubblewrap, host.tried = host.tried, []
    await host.prober.probe(LANDLOCK)

    assert only_bubblewrap == ["bubblewrap"]
    assert host.tried == ["landlock"]


async def test_landlock_takes_the_place_of_a_bubblewrap_that_does_not_serve(host: Host) -> None:
    """It is chosen for the networks that bubblewrap cannot limit here, and only for these."""
    host.faults = {"bubblewrap": {"broker-only": "no namespace"}, "landlock": {}}

    assert [await host.kind(one) for one in (AUTO, LIMITED)] == ["bubblewrap", "landlock"]
    assert host.tried == ["bubblewrap", "landlock"]


# ------------------------------------------------------------ when a trial is repeated


async def test_a_result_is_kept_while_nothing_changes(host: Host) -> None:
    """Sessions that open at once share one trial."""
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(host.kind)
    host.now += 1e9

    assert await host.kind() == "bubblewrap"
    assert host.tried == ["bubblewrap"]


async def test_a_replaced_bubblewrap_is_tried_again(host: Host) -> None:
    """It is the same path; the file behind it is another one, or was changed in place."""
    kinds = [await host.kind()]
    host.faults["bubblewrap"] = {"full": "it isolates nothing"}
    host.install()
    kinds.append(await host.kind())
    host.faults["bubblewrap"] = {}
    host.program.write_text("#!/bin/sh\necho bubblewrap 2\n")
    kinds.append(await host.kind())

    assert kinds == ["bubblewrap", None, "bubblewrap"]
    assert host.tried.count("bubblewrap") == 3


async def test_a_removed_bubblewrap_gives_way_to_landlock_and_comes_back(host: Host) -> None:
    """The reason of Landlock says what bubblewrap would add, and how to get it."""
    host.faults["landlock"] = {}
    kinds = [await host.kind()]
    host.program.unlink()
    os.environ["PATH"] = str(host.program.parent)
    kinds.append(await host.kind())
    choice = host.prober.last.choose(CWD, HOME, AUTO)
    host.install()
    kinds.append(await host.kind())

    assert kinds == ["bubblewrap", "landlock", "bubblewrap"]
    assert "bubblewrap would add processes of the session's own" in choice.more
    assert "bubblewrap (bwrap) is not installed: " in choice.more
    assert choice.more.endswith(" bubblewrap.")


async def test_a_bubblewrap_that_comes_first_on_the_path_is_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is one of the program that sessions would get."""
    await host.kind()
    earlier = host.program.parent / "earlier"
    earlier.mkdir()
    (earlier / "bwrap").symlink_to(host.program)
    monkeypatch.setenv("PATH", f"{earlier}:{os.environ['PATH']}")
    spec = (await host.prober.probe(AUTO)).choose(CWD, HOME, AUTO).spec

    assert spec is not None
    assert (spec.program, host.tried) == (str(earlier / "bwrap"), ["bubblewrap", "bubblewrap"])


async def test_a_bubblewrap_in_a_relative_folder_is_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another one in the directory of each session."""
    monkeypatch.chdir(host.program.parent)
    monkeypatch.setenv("PATH", ".")

    assert await host.kind() is None
    assert host.tried == ["landlock"]


async def test_a_bubblewrap_that_is_replaced_during_its_trial_is_tried_again(host: Host) -> None:
    """One that changes each time is not used."""
    host.during = host.install
    changing = await host.kind()
    why = host.prober.last.choose(CWD, HOME, AUTO).why
    host.during = lambda: None
    host.now += 5

    assert changing is None
    assert "it changed each time while it was tried" in why
    assert host.tried.count("bubblewrap") == 3
    assert await host.kind() == "bubblewrap"


async def test_closed_user_namespaces_are_noticed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel setting counts like the program: no session waits for its executor to find out."""
    kernel = ["15000", "1", "0"]
    monkeypatch.setattr(sandbox_probe, "kernel_settings", lambda: tuple(kernel))
    kinds = [await host.kind()]
    host.faults["bubblewrap"], kernel[0] = {"full": "no permissions"}, "0"
    kinds.append(await host.kind())
    found = host.prober.last
    host.faults["bubblewrap"], kernel[0] = {}, "15000"
    kinds.append(await host.kind())

    assert kinds == ["bubblewrap", None, "bubblewrap"]
    assert found.bubblewrap is not None
    assert "user.max_user_namespaces is 0" in found.bubblewrap.remedy
    assert not found.is_lost


def test_the_kernel_setting_that_closes_namespaces_is_named() -> None:
    """A setting that the kernel does not have closes nothing."""
    assert closed_by(("", "", "")) == closed_by(("15000", "1", "0")) == ""
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in closed_by(("15000", "0", "1"))
    assert "/etc/apparmor.d/bwrap" in closed_by(("15000", "", "1"))
    assert len(kernel_settings()) == 3


async def test_a_failed_trial_is_repeated_more_and_more_rarely(host: Host) -> None:
    """What failed for a moment recovers within seconds; what fails for good costs little."""
    host.faults["bubblewrap"] = {"full": "too many processes"}
    for _ in range(1000):
        await host.kind()
        host.now += 1

    assert 5 < host.tried.count("bubblewrap") < 12


async def test_a_refused_sandbox_is_tried_again_once(host: Host) -> None:
    """An executor refused it. If the trial holds again, further doubts in the next seconds change nothing."""
    first = await host.prober.probe(AUTO)
    for _ in range(3):
        host.prober.doubt("bubblewrap", first)
        again = await host.prober.probe(AUTO)
    once = len(host.tried)
    host.now += 10
    host.prober.doubt("bubblewrap", first)
    await host.prober.probe(AUTO)

    assert again.bubblewrap is first.bubblewrap
    assert (once, len(host.tried)) == (2, 3)


async def test_a_doubt_about_an_earlier_result_is_void(host: Host) -> None:
    """Of many sessions that are refused at once, the first lets it be tried again."""
    host.faults["landlock"] = {}
    first = await host.prober.probe(AUTO)
    host.faults["bubblewrap"] = {"full": "it broke"}
    host.prober.doubt("bubblewrap", first)
    second = await host.prober.probe(AUTO)
    host.prober.doubt("bubblewrap", first)
    await host.prober.probe(AUTO)

    assert second.bubblewrap is not first.bubblewrap
    assert host.tried == ["bubblewrap", "bubblewrap", "landlock"]


async def test_a_sandbox_that_is_lost_without_a_visible_reason_says_so(host: Host) -> None:
    """An agent that used up the account's namespaces must not open a session without a sandbox."""
    host.prober.doubt("bubblewrap", await host.prober.probe(AUTO))
    host.faults["bubblewrap"] = {"full": "no space left"}
    lost = (await host.prober.probe(AUTO)).choose(CWD, HOME, AUTO)
    host.install()
    replaced = (await host.prober.probe(AUTO)).choose(CWD, HOME, AUTO)
    host.faults["landlock"] = {}
    host.now += 1000
    locked = (await host.prober.probe(AUTO)).choose(CWD, HOME, AUTO)

    assert (lost.is_lost, replaced.is_lost, locked.is_lost) == (True, False, False)
    assert locked.spec is not None


async def test_a_trial_that_cannot_run_leaves_nothing_behind(host: Host) -> None:
    """The next session tries it."""

    def fail() -> None:
        raise OSError("the launcher is away")

    host.during = fail
    with pytest.raises(OSError, match="away"):
        await host.kind()
    host.during = lambda: None

    assert await host.kind() == "bubblewrap"


# ------------------------------------------------------------ choosing


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (SandboxSettings(mode="off", kind="any"), ()),
        (AUTO, ("bubblewrap", "landlock")),
        (REQUIRED, ("bubblewrap",)),
        (ANY, ("bubblewrap", "landlock")),
        (SandboxSettings(kind="bubblewrap"), ("bubblewrap",)),
        (LANDLOCK, ("landlock",)),
        (SandboxSettings(mode="require", kind="landlock"), ("landlock",)),
    ],
)
def test_the_settings_say_which_kinds_count(settings: SandboxSettings, kinds: tuple[m.SandboxKind, ...]) -> None:
    """Who required a sandbox before there was Landlock meant bubblewrap."""
    assert kinds_of(settings) == kinds


@pytest.mark.parametrize("settings", [AUTO, REQUIRED, ANY, LIMITED, LANDLOCK, SandboxSettings(kind="bubblewrap")])
@pytest.mark.parametrize("landlock", [None, LOCKED, NO_LANDLOCK])
@pytest.mark.parametrize("program", [None, HOLDING, BROKEN, MISSING])
def test_no_session_gets_a_sandbox_that_was_not_tried_or_is_excluded(
    settings: SandboxSettings, landlock: KindTrial | None, program: KindTrial | None
) -> None:
    """All combinations: bubblewrap if it holds, otherwise Landlock if it holds and the settings allow it."""
    choice = probed(program, landlock).choose(CWD, HOME, settings)
    allowed = kinds_of(settings)
    expected = "bubblewrap" if program is HOLDING and "bubblewrap" in allowed else None
    if expected is None and landlock is LOCKED and "landlock" in allowed:
        expected = "landlock"

    assert (None if choice.spec is None else choice.spec.kind) == expected
    assert bool(choice.why) == (expected is None)
    assert bool(choice.more) == (expected == "landlock")
    if choice.spec is not None:
        assert choice.spec.program == {"bubblewrap": "/usr/bin/bwrap", "landlock": ""}[choice.spec.kind]
        assert choice.named == {"bubblewrap": "bubblewrap 0.8.0", "landlock": "Landlock, ABI 7"}[choice.spec.kind]


def test_the_settings_add_to_what_a_session_gets() -> None:
    """`~/` means the account's home; Hutch's own files are always hidden."""
    chosen = SandboxSettings(home="hidden", show=("~/sdk", "/data"), write=("~/.m2",), hide=("~/sdk/keys",))
    choices = [probed(*found).choose(CWD, HOME, chosen) for found in ((HOLDING, None), (MISSING, LOCKED))]
    spec = m.SandboxSpec(
        "/usr/bin/bwrap",
        hide=("/state", "/home/ada/sdk/keys"),
        show=("/code", "/home/ada/sdk", "/data"),
        write=("/home/ada/.m2",),
        home="hidden",
    )

    assert [one.spec for one in choices] == [spec, msgspec.structs.replace(spec, program="", kind="landlock")]


def test_the_network_of_the_settings_reaches_the_executor() -> None:
    """An unavailable network matters only to sessions that require it."""
    limited = KindTrial("bubblewrap", {"broker-only": "it is forbidden"}, PROGRAM)
    allowed = SandboxSettings(network="allow-list", allow=("example.com",))
    full, listed = (probed(limited).choose(CWD, HOME, one).spec for one in (AUTO, allowed))

    assert full is not None
    assert listed is not None
    assert (full.network, listed.network, listed.allow) == ("full", "allow-list", ("example.com",))


@pytest.mark.parametrize(
    ("found", "cwd", "chosen", "why"),
    [
        (probed(HOLDING), CWD, SandboxSettings(mode="off"), 'mode = "off"'),
        (probed(HOLDING), HOME, AUTO, "the home itself"),
        (probed(HOLDING), "/home", AUTO, "the home itself"),
        (probed(HOLDING), "/", AUTO, "the home itself"),
        (SandboxProbe(HOLDING, LOCKED, ("/srv/app/.hutch",)), "/srv/app", AUTO, "/srv/app/.hutch lies in its working"),
        (probed(MISSING, NO_LANDLOCK), CWD, AUTO, "not installed; Landlock cannot set one up here (the kernel"),
        (probed(BROKEN, NO_LANDLOCK), CWD, AUTO, "bubblewrap cannot set one up here (it is broken)"),
        (probed(MISSING, LOCKED), CWD, REQUIRED, 'Landlock is used only if kind = "any"'),
        (
            probed(MISSING, LOCKED),
            CWD,
            SandboxSettings(network="allow-list"),
            'network = "allow-list" does not work here with Landlock (it has no proxy)',
        ),
        (
            probed(KindTrial("bubblewrap", {"broker-only": "it is forbidden"}, PROGRAM), NO_LANDLOCK),
            CWD,
            LIMITED,
            'network = "broker-only" does not work here with bubblewrap (it is forbidden)',
        ),
        (SandboxProbe(), CWD, AUTO, "it was not tried"),
    ],
)
def test_a_session_without_a_sandbox_has_a_reason(
    found: SandboxProbe, cwd: str, chosen: SandboxSettings, why: str
) -> None:
    """The reason is one sentence."""
    choice = found.choose(cwd, HOME, chosen)

    assert choice.spec is None
    assert why in choice.why


@pytest.mark.parametrize(
    ("cwd", "chosen", "inside"),
    [
        ("/code", AUTO, "/code"),
        ("/", AUTO, None),
        (CWD, SandboxSettings(write=("/state",)), "/state"),
        (CWD, SandboxSettings(write=("/",)), "/"),
        (CWD, SandboxSettings(hide=("~/project/.env",)), "/home/ada/project/.env"),
        (CWD, SandboxSettings(show=("~/project/sdk",)), "/home/ada/project/sdk"),
        (CWD, SandboxSettings(write=("~/.m2",), hide=("~/.m2/settings.xml",)), "/home/ada/.m2/settings.xml"),
    ],
)
def test_landlock_is_not_used_for_a_protected_place_inside_a_writable_one(
    cwd: str, chosen: SandboxSettings, inside: str | None
) -> None:
    """Its rights are of whole hierarchies. bubblewrap protects such a place."""
    choice = probed(MISSING, LOCKED).choose(cwd, HOME, chosen)
    by_bubblewrap = probed(HOLDING, LOCKED).choose(cwd, HOME, chosen)

    assert choice.spec is None
    assert inside is None or f"Landlock cannot protect {inside}" in choice.why or inside == "/"
    assert (by_bubblewrap.spec is None) == (inside is None)


def test_a_path_behind_a_link_has_both_names(tmp_path: Path) -> None:
    """A session in a directory that contains the home or Hutch's files has no sandbox, even through a link."""
    (tmp_path / "real" / "ada").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    linked, real = str(tmp_path / "link" / "ada"), str(tmp_path / "real")
    hidden = SandboxProber(([linked], []), try_here).last
    shown = SandboxProbe(MISSING, LOCKED, (), (linked,))

    assert hidden.hide == (linked, f"{real}/ada")
    assert "lies in its working" in hidden.choose(real, HOME, AUTO).why
    assert "the home itself" in probed(HOLDING).choose(real, linked, AUTO).why
    assert "Landlock cannot protect" in shown.choose(real, HOME, AUTO).why
