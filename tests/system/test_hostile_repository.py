"""A repository whose settings name programs everywhere: what Hutch does in it runs none of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_executor.sandbox.project_programs import READING_GIT
from hutch_shared import messages as m
from tests.hostile_repository import HostileRepository
from tests.programs import bubblewrap, landlock_holds
from tests.rehearsal import Model, Say, Step, Steps, Use, anything
from tests.sampling import sample
from tests.system.host import HUTCH, KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

NOTIFY = 'cat > "$HOME/told.part"; command -v git > "$HOME/git"; pwd > "$HOME/pwd"; mv "$HOME/told.part" "$HOME/told"'
KINDS = ["bubblewrap", "landlock", "off"]


@pytest.fixture
def project(tmp_path: Path) -> HostileRepository:
    """The repository."""
    (tmp_path / "project").mkdir()
    made = HostileRepository(tmp_path / "project" / "work", str(shutil.which("git")))
    made.ran()
    return made


@asynccontextmanager
async def host_for(model: Model, kind: str, path: str = "") -> AsyncIterator[Host]:
    """A host with this kind of sandbox, which notifies its user. `path` comes first on its PATH."""
    if kind == "bubblewrap":
        bubblewrap()
    if kind == "landlock" and not landlock_holds():
        pytest.skip("kernel: it has no Landlock")
    sandbox = 'mode = "off"' if kind == "off" else f'mode = "require"\nkind = "{kind}"'
    settings = f"[sandbox]\n{sandbox}\n[permissions]\nreturn_grace = 0.2\nnotify = ['sh', '-c', '''{NOTIFY}''']\n"
    model.key = KEY
    async with host(settings_for(model, settings), env={"PATH": path + os.environ["PATH"]}) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


async def in_project(on: Host, project: HostileRepository, *arguments: str) -> str:
    """Run the `hutch` command in the project, as its user does."""
    command = [*HUTCH, *arguments]
    done = await anyio.run_process(command, env={**on.env, "NO_COLOR": "1"}, cwd=project.place, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


async def edit(on: Host, hutch: HutchClient, project: HostileRepository) -> str:
    """Run a turn with an edit that asks, look at the request and at the status, and allow it. Return what was shown."""
    session = await hutch.open_session(m.OpenSession("claude", str(project.place), permission_mode="ask"))
    async with log_of(hutch, session, answers=False) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        shown = await in_project(on, project, "pending")
        await in_project(on, project, "status")
        await wait_for(lambda: (on.home / "told").exists())
        await hutch.answer_permission(m.AnswerPermission(asked.id, "allow"))
        end = await log.ended(turn)
    await in_project(on, project, "inspect", session.id)
    await hutch.close_session(session.id)
    assert end.state == "completed", end
    assert (project.place / "f.txt").read_text() == "three\n"
    return shown


@sample(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_hutch_does_in_a_repository_runs_nothing_of_it(
    model: Model, project: HostileRepository, kind: str
) -> None:
    """The CLI's own git, a permission request with its diff, `status`, notify: no program of the repository runs.

    Nor does one of the same name in the project, which is first on PATH.
    """
    file = str(project.place / "f.txt")
    model.script = Steps(
        ("go", Use("Read", {"file_path": file})),
        ("", Use("Edit", {"file_path": file, "old_string": "two", "new_string": "three"})),
        Step(anything, Say("done"), None),
    )
    before = len(model.requests)
    async with host_for(model, kind, f"{project.place}/bin:.::bin:") as on, on.client() as hutch:
        shown = await edit(on, hutch, project)
        notified = {name: (on.home / name).read_text().strip() for name in ("git", "pwd")}
        home = str(on.home)

    asked = str(model.requests[before].body)
    assert project.ran() == set()
    assert "Recent commits:" in asked, "the CLI's own git did not answer"
    assert "f.txt" in shown
    assert notified == {"git": project.git, "pwd": home}


@sample(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_agents_own_git_is_plain_git(model: Model, project: HostileRepository, kind: str) -> None:
    """A command that was allowed runs what the user expects: filters, monitor, hooks; PATH names nothing of Hutch."""
    command = (
        "git status; git -c user.name=a -c user.email=a@example.org commit -qam two;"
        " command -v git; echo path=$PATH; env | grep -c HUTCH_AGENT_GIT"
    )
    model.script = Steps(("go", Use("Bash", {"command": command})), Step(anything, Say("done"), None))
    async with host_for(model, kind) as on, on.client() as hutch:
        session = await hutch.open_session(m.OpenSession("claude", str(project.place), permission_mode="bypass"))
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
            (said,) = log.of("tool_result")

    ran = project.ran()
    assert end.state == "completed"
    assert ran >= {"fsmonitor", "filter-clean", "sub-fsmonitor", "pre-commit"}, said.text
    assert READING_GIT not in said.text
    assert project.git in said.text
    assert said.text.rstrip().splitlines()[-1].endswith("0"), said.text
