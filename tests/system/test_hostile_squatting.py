"""Paths that an attacker created, replaced or linked beforehand: Hutch follows none into another user's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.events import TurnEnded
from tests.accounts import Account
from tests.programs import bubblewrap
from tests.rehearsal import Model, Say, Steps, Use, serve
from tests.sampling import sample
from tests.system.host import KEY, settings_for
from tests.system.hostile import bash, claude, open_script, run_claude, whole
from tests.system.log import DEADLINE, executor_of, log_of
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180), sample(5)]

SECRET = "what-only-alice-may-read-7Tb5Vn8Kd4"
Tree = dict[str, tuple[int, int, int, bytes]]


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[Model]:
    """The model of both agents."""
    async with serve(key=KEY, script=lambda _: Say("hello")) as served:
        yield served


@pytest.fixture(scope="module")
async def host(model: Model) -> AsyncIterator[SharedHost]:
    """A host on which Alice keeps a secret."""
    bubblewrap()
    async with shared_host("alice", "mallory", settings=settings_for(model, "[executors]\nspares = 0\n")) as made:
        alice = made.people["alice"]
        for who in made.people.values():
            await made.hutch(who, "key", "add", "anthropic", input=KEY)
        folder = alice.home / ".claude" / "projects"
        folder.mkdir(parents=True)
        for path in (alice.home / "secret.txt", folder / "secret.jsonl", alice.home / "CLAUDE.md"):
            path.write_text(SECRET)
        for path in alice.home.rglob("*"):
            os.chown(path, alice.uid, alice.gid)
        yield made


@pytest.fixture
async def untouched(host: SharedHost) -> AsyncIterator[Account]:
    """Return Alice, and check afterwards that her home is unchanged."""
    alice = host.people["alice"]
    before = tree(alice.home)
    yield alice
    await whole(host)
    assert tree(alice.home) == before


def tree(root: Path) -> Tree:
    """Return all files below a folder."""
    found: Tree = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_nlink, content)
    return found


async def let_go(hutch: HutchClient, session: m.Session, who: Account) -> None:
    """End a session's executor with the rights of its account."""
    who.run("kill", "-KILL", str(await executor_of(hutch, session)))
    with anyio.fail_after(DEADLINE):
        while any(one.session == session.id for one in (await hutch.get_status()).executors):
            await anyio.sleep(0.05)


async def played(hutch: HutchClient, session: m.Session, prompt: str) -> tuple[TurnEnded, str]:
    """Run a turn; return its end and all of its output."""
    async with log_of(hutch, session) as log:
        end = await log.play(session, prompt)
        return end, " ".join(bytes(event.data).decode() for event in log.events)


@contextmanager
def moved(path: Path) -> Iterator[None]:
    """Move a path away during the block, and back."""
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    try:
        yield
    finally:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        kept.rename(path)


@pytest.mark.parametrize("way", ["folder", "file", "fifo", "parts"])
async def test_a_linked_spool_hands_in_no_foreign_file(host: SharedHost, untouched: Account, way: str) -> None:
    """The next executor reads it as its own account: it neither hangs nor hands in another user's files."""
    mallory = host.people["mallory"]
    async with host.client(mallory) as hutch:
        session = await open_script(host, hutch, mallory, [{"text": "on"}], f"spool-{way}")
        first, _ = await played(hutch, session, "go")
        own = next((host.spool / str(mallory.uid)).glob("x-*"))
        spool = next(own.glob("*.spool"))
        secret = untouched.home / "secret.txt"
        commands = {
            "folder": f"rm -rf {own}; ln -s {untouched.home} {own}",
            "file": f"rm {spool}; ln -s {secret} {spool}",
            "fifo": f"rm {spool}; mkfifo {spool}",
            "parts": f"ln -s {secret} {own}/{own.name}.{1:020}.part; mkfifo {own}/{own.name}.{9:020}.part",
        }
        done = mallory.run("sh", "-c", commands[way])
        await let_go(hutch, session, mallory)
        again, told = await played(hutch, session, "again")
        await hutch.close_session(session.id, force=True)
        mallory.run("rm", "-rf", str(own))

    assert (done.returncode, done.stderr) == (0, "")
    assert (first.state, again.state) == ("completed", "completed"), again
    assert SECRET not in told


async def test_a_spool_directory_that_its_account_opened_is_closed_again(host: SharedHost, untouched: Account) -> None:
    """The next start restores its mode, so that users do not lock themselves out."""
    mallory = host.people["mallory"]
    async with host.client(mallory) as hutch:
        session = await open_script(host, hutch, mallory, [{"text": "on"}], "made")
        assert (await played(hutch, session, "go"))[0].state == "completed"
        await let_go(hutch, session, mallory)
        mine = host.spool / str(mallory.uid)
        mallory.run("chmod", "777", str(mine))
        again, _ = await played(hutch, session, "again")
        await hutch.close_session(session.id, force=True)

    assert again.state == "completed"
    assert mine.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("level", ["account", "strict"])
async def test_a_working_directory_that_became_a_link_fails_the_turn(
    host: SharedHost, untouched: Account, level: m.IsolationLevel
) -> None:
    """The reason does not show the link's target."""
    mallory = host.people["mallory"]
    async with host.client(mallory) as hutch:
        session = await open_script(
            host, hutch, mallory, [bash("cat secret.txt; touch here")], f"swap-{level}", isolation=level
        )
        await played(hutch, session, "go")
        await let_go(hutch, session, mallory)
        cwd = Path(session.cwd)
        mallory.run("sh", "-c", f"mv {cwd} {cwd}.old; ln -s {untouched.home} {cwd}")
        end, told = await played(hutch, session, "again")
        await hutch.close_session(session.id, force=True)

    assert end.state == "failed"
    assert SECRET not in told


async def test_a_home_linked_to_another_gives_no_access(host: SharedHost, untouched: Account, model: Model) -> None:
    """Both kinds of agents run as their own account and can neither read nor write in the other home."""
    mallory = host.people["mallory"]
    work = host.root / "elsewhere"
    work.mkdir()
    os.chown(work, mallory.uid, mallory.gid)
    script = work / "script.jsonl"
    script.write_text('{"tool": "Bash", "input": {"command": "cat ~/secret.txt; touch ~/here; id -u"}, "run": true}\n')
    script.chmod(0o644)
    look = Use("Bash", {"command": "cat ~/secret.txt ~/CLAUDE.md; touch ~/here"})
    model.script = Steps(("go", look), ("", Say("done")))
    before = len(model.requests)
    with moved(mallory.home):
        mallory.home.symlink_to(untouched.home)
        async with host.client(mallory) as hutch:
            told = ""
            for agent in ("script", "claude"):
                options = m.AgentOptions(script=str(script) if agent == "script" else None)
                session = await hutch.open_session(
                    m.OpenSession(agent, str(work), permission_mode="bypass", options=options)
                )
                end, said = await played(hutch, session, "go")
                told += said
                await hutch.close_session(session.id, force=True)
                assert end.state == "completed" if agent == "script" else end.state in ("completed", "failed"), end
    shutil.rmtree(work)

    assert SECRET not in told
    assert f"{mallory.uid}\\n" in told
    assert all(SECRET.encode() not in request.raw for request in model.requests[before:])


@pytest.mark.parametrize("where", [".claude", ".claude/projects"])
async def test_linked_conversations_are_not_used(
    host: SharedHost, untouched: Account, model: Model, where: str
) -> None:
    """Conversations are neither stored nor read behind the link: they have a directory of their own."""
    mallory = host.people["mallory"]
    link = mallory.home / where
    mallory.run("sh", "-c", f"rm -rf ~/.claude; mkdir -p {link.parent}; ln -s {untouched.home / where} {link}")
    model.script = Steps(("go", Use("Bash", {"command": "cat ~/.claude/projects/secret.jsonl"})), ("", Say("done")))
    async with host.client(mallory) as hutch:
        session = await claude(host, hutch, mallory, "linked")
        end, told = await played(hutch, session, "go")
        await hutch.close_session(session.id, force=True)
    mallory.run("rm", "-rf", str(mallory.home / ".claude"))

    assert end.state == "completed", end
    assert SECRET not in told


async def test_an_agents_files_belong_to_its_account_and_go_with_the_session(
    host: SharedHost, untouched: Account, model: Model
) -> None:
    """Nobody else can enter the directory. An executor of the account removes it, and follows no link out of it."""
    mallory = host.people["mallory"]
    model.script = Steps(("go", Say("done")))
    async with host.client(mallory) as hutch:
        session = await claude(host, hutch, mallory, "removed")
        end, _ = await played(hutch, session, "go")
        directory = host.spool / str(mallory.uid) / "agents" / session.id
        status = directory.stat()
        kept = len(list(directory.rglob("*.jsonl")))
        mallory.run("ln", "-s", str(untouched.home), str(directory / "link"))
        mallory.run("sh", "-c", f"mkdir -p {directory}/closed/x; chmod 0 {directory}/closed")
        await hutch.close_session(session.id, force=True)
        await hutch.call("delete_session", m.SessionRef(session.id))
        other = await open_script(host, hutch, mallory, [{"text": "on"}], "other")
        await played(hutch, other, "go")
        with anyio.fail_after(DEADLINE):
            while directory.exists():
                await anyio.sleep(0.05)
        await hutch.close_session(other.id, force=True)

    assert end.state == "completed", end
    assert kept == 1
    assert (status.st_uid, status.st_mode & 0o777) == (mallory.uid, 0o700)
    assert not (mallory.home / ".claude").exists()


@pytest.mark.parametrize("folder", [".", "squatted"])
async def test_a_squatted_name_in_tmp_gets_no_output(host: SharedHost, model: Model, folder: str) -> None:
    """If another account created the file or link first, no command output is stored there."""
    alice, mallory = host.people["alice"], host.people["mallory"]
    theirs = mallory.home / "caught"
    names = [f"/tmp/claude-{alice.uid}", "/tmp/claude", f"/tmp/hutch-{alice.uid}"]
    free = [name for name in names if not os.path.lexists(name)]
    assert names[0] in free
    mallory.run("sh", "-c", f"mkdir -p {theirs}; chmod 777 {theirs}; chmod 711 ~; ln -s {theirs} {free[0]}")
    for name in free[1:]:
        mallory.run("mkdir", "-m", "777", name)
    caught: set[str] = set()
    ends: list[TurnEnded] = []
    try:
        async with anyio.create_task_group() as tasks:

            async def look() -> None:
                while True:
                    for place in (theirs, *map(Path, free[1:])):
                        for path in place.rglob("*"):
                            if path.is_file() and SECRET.encode() in path.read_bytes():
                                caught.add(str(path))
                    await anyio.sleep(0.01)

            tasks.start_soon(look)
            _, end, said = await run_claude(host, model, alice, f"echo {SECRET}; sleep 0.5", folder)
            ends.append(end)
            tasks.cancel_scope.cancel()
        left = [str(path) for place in (theirs, *map(Path, free[1:])) for path in place.rglob("*")]
    finally:
        for name in free:
            mallory.run("rm", "-rf", name)
        mallory.run("chmod", "700", str(mallory.home))
    await whole(host)

    assert caught == set()
    assert left == []
    assert (ends[0].state, SECRET in said) == ("completed", True), (ends, said)
