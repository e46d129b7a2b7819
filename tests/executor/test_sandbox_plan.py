"""The sandbox of an agent: the files that a program inside sees, and its rights."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from hutch_executor.sandbox import plan
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.probe import probe_sandbox
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.programs import bubblewrap

NOBODY = 65534
Home = Literal["tools", "read_only", "hidden"]


@dataclass(frozen=True, slots=True)
class Place:
    """A home with secrets, tools, notes and a project; Hutch's state directory beside it."""

    root: Path
    program: str

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def project(self) -> Path:
        return self.home / "project"

    @property
    def state(self) -> Path:
        return self.root / "state"

    def words(
        self,
        *,
        cwd: Path | None = None,
        home: Home = "tools",
        hide: Iterable[Path] = (),
        show: Iterable[Path] = (),
        sockets: Iterable[Path] = (),
    ) -> tuple[str, ...]:
        """Return the command that starts the sandbox."""
        spec = m.SandboxSpec(self.program, (str(self.state), *map(str, hide)), home=home)
        return plan_sandbox(
            spec, str(cwd or self.project), str(self.home), show=map(str, show), sockets=map(str, sockets)
        ).argv()

    def say(self, command: str, words: tuple[str, ...] | None = None, become: Iterable[str] = ()) -> str:
        """Run a shell command inside and return its output, errors included."""
        done = subprocess.run(
            [*become, *(words or self.words()), "/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
            timeout=60,
            check=False,
        )
        return done.stdout.strip()


@pytest.fixture
def place() -> Iterator[Place]:
    """A place in a directory that every account can reach."""
    program = bubblewrap()
    with tempfile.TemporaryDirectory(prefix="hutch-plan-") as made:
        root = Path(made).resolve()
        root.chmod(0o755)
        for name in ("home/.ssh/id", "home/.cargo/bin/tool", "home/.cargo/credentials", "home/notes", "state/vault"):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<{path.name}>")
        (root / "home" / "project").mkdir()
        yield Place(root, program)


def test_the_working_directory_is_where_it_was_and_can_be_written(place: Place) -> None:
    """Paths are the same inside and outside, so that rules about them hold."""
    said = place.say("pwd; echo made > file")

    assert said == str(place.project)
    assert (place.project / "file").read_text() == "made\n"


def test_the_system_can_be_read_and_not_written(place: Place) -> None:
    """Programs run; not even uid 0 can change a file of the host."""
    said = place.say(
        "for p in /usr /etc /sys /proc/sys/kernel/core_pattern; do test -w $p && echo $p; done; ls --version"
    )

    assert said.startswith("ls (")


@pytest.mark.parametrize(
    ("home", "seen"), [("tools", {"tool"}), ("read_only", {"tool", "notes"}), ("hidden", set[str]())]
)
def test_a_setting_selects_the_visible_part_of_the_home(place: Place, home: Home, seen: set[str]) -> None:
    """By default the tools are visible; secrets never are."""
    said = place.say("cat ~/.ssh/id ~/notes ~/.cargo/bin/tool ~/.cargo/credentials", place.words(home=home))

    assert {name for name in ("id", "notes", "tool", "credentials") if f"<{name}>" in said} == seen


def test_files_left_in_the_home_end_with_the_agent(place: Place) -> None:
    """So the user runs no program that the agent left. Caches can still be written."""
    said = place.say("mkdir -p ~/.cache/x ~/.config/autostart && echo x > ~/.profile && echo written")

    assert said == "written"
    assert sorted(os.listdir(place.home)) == [".cargo", ".ssh", "notes", "project"]


def test_hutchs_state_is_hidden_everywhere(place: Place) -> None:
    """It is hidden in a working directory that contains it, behind a link, and as a single file."""
    work = place.root / "home" / "project"
    (work / "state").mkdir()
    (work / "state" / "vault").write_text("<vault>")
    (work / "link").symlink_to("state")
    (work / "hutch.toml").write_text("<settings>")
    said = place.say("cat state/* link/* hutch.toml", place.words(hide=(work / "link", work / "hutch.toml")))

    assert "No such file" in said
    assert "<" not in said


@pytest.mark.parametrize("home", ["tools", "read_only", "hidden"])
def test_a_home_behind_a_link_hides_places_by_both_names(place: Place, home: Home) -> None:
    """The same places are visible and hidden by the account's name for the home and by its real path."""
    named = place.root / "named"
    named.symlink_to("home")
    spec = m.SandboxSpec(place.program, (str(named / "vault"), str(place.state)), home=home)
    (place.home / "vault").write_text("<vault>")
    (place.project / "file").write_text("<file>")
    said = {
        path.name: place.say(
            f"cd {path}; cat .ssh/id .cargo/credentials vault .cargo/bin/tool project/file; pwd -P",
            plan_sandbox(spec, str(place.project), str(named)).argv(),
        )
        for path in (place.home, named)
    }

    assert said["home"] == said["named"]
    assert "<file>" in said["named"]
    assert ("<tool>" in said["named"]) == (home != "hidden")
    assert said["named"].endswith(str(place.home))
    assert not [word for word in ("<id>", "<credentials>", "<vault>") if word in said["named"]]


def test_links_lead_where_they_lead_outside(place: Place) -> None:
    """A tool that is reached over several links is found by the name of each link."""
    kept = place.root / "kept"
    (kept / "dot").mkdir(parents=True)
    (kept / "dot" / "gitconfig").write_text("<gitconfig>")
    (place.home / "dotfiles").symlink_to("../kept/dot")
    (place.home / ".gitconfig").symlink_to("dotfiles/gitconfig")

    said = place.say("cat ~/.gitconfig ~/dotfiles/gitconfig; ls ~/dotfiles/..; readlink ~/.gitconfig")
    assert said.split() == ["<gitconfig><gitconfig>dot", "dotfiles/gitconfig"]


def test_a_name_that_is_hidden_in_a_private_home_is_not_there_and_can_be_made(place: Place) -> None:
    """A program can create its settings there; otherwise it would retry for a long time."""
    (place.home / ".claude.json").write_text("<settings>")
    said = place.say("ls -A ~; echo own > ~/.new && mv ~/.new ~/.claude.json && cat ~/.claude.json")

    assert said.split() == [".cargo", "project", "own"]
    assert (place.home / ".claude.json").read_text() == "<settings>"


def test_a_hidden_file_among_tools_is_empty(place: Place) -> None:
    """A tool that reads its settings there goes on; a file that cannot be opened would end it."""
    said = place.say(
        "cat ~/.cargo/credentials && echo read; wc -c < ~/.cargo/credentials; echo x > ~/.cargo/credentials"
    )

    assert said.split()[:2] == ["read", "0"]
    assert (place.home / ".cargo" / "credentials").read_text() == "<credentials>"


@pytest.mark.parametrize("hidden", [True, False])
def test_protected_places_cannot_be_moved_with_their_folder(place: Place, *, hidden: bool) -> None:
    """An agent can neither move a hidden place to where the next agent sees it, nor replace a program."""
    inner = place.project / "a" / "b" / "own"
    inner.mkdir(parents=True)
    (inner / "file").write_text("<own>")
    words = place.words(hide=(inner,)) if hidden else place.words(show=(inner,))
    said = place.say("mv a/b c; mv a d; rm -rf a; touch a/beside a/b/beside && ls a/b", words)

    assert said.splitlines()[-2:] == ["beside", "own"]
    assert (inner / "file").read_text() == "<own>"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("export ANTHROPIC_API_KEY=sk-ant-api03-abc0123456789", False),
        ("# export OPENAI_API_KEY='sk-proj-abc0123456789'", False),
        ("DB_PASSWORD=hunter-two", False),
        ("export HTTPS_PROXY=http://ada:hunter@proxy:3128", False),
        ("github token ghp_0123456789abcdefghij", False),
        ('export PATH="$HOME/.nvm/bin:$PATH" KEYTIMEOUT=1', True),
        ("export API_KEY=$(pass show key) SSH_KEY_PATH=~/.ssh/id_ed25519", True),
        ("signingkey = 0123456789ABCDEF0123", True),
        ('[url "ssh://git@github.com/"] insteadOf = https://github.com/', True),
    ],
)
@pytest.mark.parametrize("home", ["tools", "read_only"])
def test_a_startup_file_is_seen_when_no_key_is_in_it(place: Place, line: str, home: Home, *, seen: bool) -> None:
    """A shell would pass a key set there to every command of the agent."""
    (place.home / ".bashrc").write_text(f"# start\n{line}\n")
    (place.home / ".gitconfig-work").write_text(f"# start\n{line}\n")
    said = place.say("cat ~/.bashrc; cat ~/.gitconfig-work", place.words(home=home))

    assert said.count("# start") == (2 if seen else 0)
    assert said.count(line) == (2 if seen else 0)
    assert place.say("cat ~/.bashrc", place.words(home="tools", show=(place.home / ".bashrc",))).startswith("# start")


def test_places_that_the_account_has_moved_are_found(place: Place) -> None:
    """XDG variables move the settings and data of programs out of the usual folders."""
    for name in ("conf/gh/hosts", "conf/git/config", "data/uv/tool", "data/uv/credentials/key"):
        (place.home / name).parent.mkdir(parents=True, exist_ok=True)
        (place.home / name).write_text(f"<{name}>")
    environ = {"XDG_CONFIG_HOME": str(place.home / "conf"), "XDG_DATA_HOME": str(place.home / "data")}
    look = "cd; cat conf/gh/hosts conf/git/config data/uv/tool data/uv/credentials/key 2>/dev/null"
    for home in ("tools", "read_only"):
        spec = m.SandboxSpec(place.program, home=home)
        said = place.say(look, plan_sandbox(spec, str(place.project), str(place.home), environ=environ).argv())

        assert said == "<conf/git/config><data/uv/tool>"


def test_no_process_of_the_host_is_seen_and_none_outlives_it(place: Place) -> None:
    """The sandbox has a pid namespace; even a background process in a session of its own ends with it."""
    mark = f"321.{os.getpid()}"
    said = place.say(f"setsid sleep {mark} >/dev/null 2>&1 & ls -d /proc/[0-9]* | wc -l")
    deadline = time.monotonic() + 20
    while (left := _running(mark)) and time.monotonic() < deadline:  # the kernel ends a pid namespace with a delay
        time.sleep(0.02)

    assert int(said) < 10
    assert left == []


def _running(mark: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_no_capability_is_left_and_none_can_be_gained(place: Place) -> None:
    """This holds for uid 0 too."""
    said = place.say("grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").split()

    assert said == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_a_socket_is_reached_only_where_it_is_shown(place: Place) -> None:
    """The directory of the broker's socket is visible in a hidden one; the agent cannot add a socket there."""
    directory = place.state / "broker"
    directory.mkdir()
    dial = 'python3 -c "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])" %s 2>/dev/null; echo $?'
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as broker:
        client.bind(str(place.state / "client.sock"))
        broker.bind(str(directory / "broker.sock"))
        client.listen()
        broker.listen()
        dialled = "; ".join(dial % path for path in (place.state / "client.sock", directory / "broker.sock"))
        command = f"rm {directory}/broker.sock || ls {place.state}; {dialled}"
        said = place.say(command, place.words(sockets=(directory,)))

    assert "Read-only" in said
    assert said.split()[-3:] == ["broker", "1", "0"]


def test_programs_of_hutch_cannot_be_changed_in_a_folder_that_holds_them(place: Place) -> None:
    """If one place lies in another, the deeper one decides."""
    code = place.project / "code"
    code.mkdir()
    said = place.say("echo x > code/file; echo y > beside", place.words(show=(code,)))

    assert "Read-only" in said
    assert os.listdir(code) == []
    assert (place.project / "beside").exists()


def test_an_agent_can_start_a_sandbox_inside(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's own sandbox works, except as root, which the kernel refuses."""
    become: list[str] = []
    if os.geteuid() == 0:
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
        monkeypatch.setattr(plan, "_EMPTY", str(place.root / "empty"))  # NOBODY may not be able to read the checkout
        (place.root / "empty").touch(0o644)
        os.chown(place.project, NOBODY, NOBODY)
    nested = f"{place.program} --unshare-user --unshare-pid --ro-bind / / --dev /dev --proc /proc echo nested"

    assert place.say(nested, become=become) == "nested"


@pytest.mark.parametrize("cwd", ["home", ".", "state/project", "/usr", "/"])
def test_a_place_without_a_possible_sandbox_is_refused(place: Place, cwd: str) -> None:
    """A session in the home, above it, in a hidden place or in the system is refused."""
    with pytest.raises(HutchError) as refused:
        place.words(cwd=place.root / cwd)

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


def test_a_probe_starts_the_sandbox(place: Place) -> None:
    """The probe returns an empty text if the sandbox holds, and otherwise the reason."""
    hide = (str(place.state), str(place.state / "vault"), str(place.home / "notes"))

    assert probe_sandbox(m.SandboxSpec(place.program, hide), str(place.home)) == ""
    assert probe_sandbox(m.SandboxSpec(place.program, hide, home="read_only"), str(place.home)) == ""
    for network in ("broker-only", "allow-list"):
        assert probe_sandbox(m.SandboxSpec(place.program, hide, network=network), str(place.home)) == ""
    assert "exit code 1" in probe_sandbox(m.SandboxSpec("/bin/false", hide), str(place.home))
    assert "No such file" in probe_sandbox(m.SandboxSpec("/nowhere/bwrap", hide), str(place.home))


def test_a_place_behind_a_link_that_an_agent_could_have_made_is_left_out(place: Place) -> None:
    """The next sandbox would show, or let change, whatever an agent put in its place."""
    cache, ssh, data = place.project / "cache", place.home / ".ssh", place.root / "data"
    data.mkdir()
    ssh.mkdir(exist_ok=True)
    cache.symlink_to(ssh)
    (place.home / "usual").symlink_to(data)
    spec = m.SandboxSpec(place.program, write=(str(cache), str(place.home / "usual")), show=(str(cache / "."),))
    places = plan_sandbox(spec, str(place.project), str(place.home)).places

    assert places[str(data)] == "write"
    assert places.get(str(ssh)) in (None, "hidden")


def test_a_shared_network_is_noticed(place: Place) -> None:
    """A bubblewrap that ignores `--unshare-net` is an example."""
    careless = place.root / "careless"
    careless.write_text(
        '#!/bin/bash\nfor word; do [ "$word" = --unshare-net ] || kept+=("$word"); done\n'
        f'exec {place.program} "${{kept[@]}}"\n'
    )
    careless.chmod(0o755)
    spec = m.SandboxSpec(str(careless), network="broker-only")

    assert probe_sandbox(spec, str(place.home)) == "the sandbox shares the network with the host"
    assert probe_sandbox(msgspec.structs.replace(spec, network="full"), str(place.home)) == ""
