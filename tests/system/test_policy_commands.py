"""`hutch policy`, `mode`, `audit` and `approve` in a shell, against a real hutchd."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.system.host import Host
from tests.system.log import allow, log_of
from tests.system.policing import SPARELESS, asked_of, bash, policed, step

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

HOST = '[permissions]\ndeny = ["Bash(curl:*)"]\n'
CASES = [
    {"id": "right", "rules": {"allow": ["Bash(ls:*)"]}, "tool": "Bash", "input": {"command": "ls"}, "want": "allow"},
    {"id": "unsafe", "rules": {"allow": ["Bash"]}, "tool": "Bash", "input": {"command": "cp a b"}, "want": "ask"},
    {"id": "missed", "tool": "Bash", "input": {"command": "rm x"}, "want": "deny"},
    {"id": "needless", "tool": "Bash", "input": {"command": "ls"}, "want": "allow"},
]


@pytest.fixture(scope="module")
async def guarded() -> AsyncIterator[Host]:
    """A host with this policy."""
    async with policed(HOST, SPARELESS) as made:
        yield made


@pytest.fixture
async def hutch(guarded: Host) -> AsyncIterator[HutchClient]:
    """A client of the host."""
    async with guarded.client() as client:
        yield client


async def test_rules_are_added_shown_explained_and_removed(guarded: Host) -> None:
    """Rules are for all projects or for one.

    `show` lists the layers, and `explain` names the layer of the deciding rule.
    """
    project = guarded.folder("ruled")
    await guarded.hutch("policy", "add", "allow", "Bash(git:*)", "-C", str(project))
    await guarded.hutch("policy", "add", "ask", "Bash(git push:*)")
    shown = await guarded.hutch("policy", "show", "-C", str(project))
    elsewhere = await guarded.hutch("policy", "show", "-o", "json")
    explained = {
        command: (await guarded.hutch("policy", "explain", "Bash", command, "-C", str(project), "-o", "json")).json
        for command in ("git status", "git push", "git status && curl x", "true")
    }
    words = await guarded.hutch("policy", "explain", "Bash", "git status | curl x", "-C", str(project))
    await guarded.hutch("policy", "remove", "allow", "Bash(git:*)", "-C", str(project))
    await guarded.hutch("policy", "remove", "ask", "Bash(git push:*)")
    after = await guarded.hutch("policy", "show", "-C", str(project))

    assert "allow Bash(git:*)" in shown.out
    assert "deny  Bash(curl:*)" in shown.out
    assert not any("Bash(git:*)" in layer["rules"].get("allow", ()) for layer in elsewhere.json["layers"])
    assert {
        command: (told["decision"], told.get("rule"), told.get("layer")) for command, told in explained.items()
    } == {
        "git status": ("allow", "Bash(git:*)", "account"),
        "git push": ("ask", "Bash(git push:*)", "account"),
        "git status && curl x": ("deny", "Bash(curl:*)", "host"),
        "true": ("ask", None, None),
    }
    assert "program   git status\nprogram   curl x" in words.out
    assert "git" not in after.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["policy", "add", "allow", "Bash(ls"], 2, "The rule 'Bash(ls' cannot be used"),
        (["policy", "remove", "allow", "Bash(ls)"], 1, "no rule to allow 'Bash(ls)' for all projects"),
        (["policy", "explain", "mcp__a__b", "x"], 2, "JSON object"),
        (["policy", "test", "missing.jsonl"], 2, "missing.jsonl cannot be read"),
        (["policy", "trust"], 1, "There is no policy file to trust"),
        (["policy", "show", "--session", "nothing-of-that-name"], 1, "nothing-of-that-name"),
        (["mode", "nothing-of-that-name", "plan"], 1, "nothing-of-that-name"),
        (["approve", "p-nothing"], 1, "There is no pending permission request p-nothing"),
        (["audit", "--since", "someday"], 2, "`someday` is not a time"),
        (["run", "--agent", "script", "--allow", "Bash(ls", "-d", "x"], 2, "The rule 'Bash(ls' cannot be used"),
    ],
)
async def test_an_error_is_a_sentence(guarded: Host, words: list[str], code: int, said: str) -> None:
    """The exit code tells the class of the error."""
    done = await guarded.hutch(*words, code=code)

    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


async def test_unsafe_cases_fail_the_policy_test(guarded: Host) -> None:
    """The report is text or JSON; the cases come from a file or standard input."""
    file = guarded.root / "cases.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    text = await guarded.hutch("policy", "test", str(file), code=1)
    record = await guarded.hutch("policy", "test", str(file), "-o", "json", code=1)
    only_needless = await guarded.hutch(
        "policy", "test", "-", input="".join(json.dumps(CASES[at]) + "\n" for at in (0, 3))
    )
    unreadable = await guarded.hutch("policy", "test", "-", input='{"id": 1}\n', code=2)

    assert text.out.splitlines()[:4] == [
        "1 of 4 cases right",
        "unsafe allows: 1 unsafe",
        "missed denies: 1 missed",
        "needless asks: 1 needless",
    ]
    assert {name: record.json.get(name) for name in ("total", "right", "unsafe_allows", "missed_denies")} == {
        "total": 4,
        "right": 1,
        "unsafe_allows": ["unsafe"],
        "missed_denies": ["missed"],
    }
    assert only_needless.out.startswith("1 of 2 cases right")
    assert "line 1" in unreadable.err


async def test_a_changed_file_is_no_longer_trusted(guarded: Host, hutch: HutchClient) -> None:
    """`distrust` withdraws the trust, even if the file is gone."""
    folder = guarded.folder("trusting")
    (folder / ".hutch").mkdir()
    file = folder / ".hutch" / "policy.toml"
    file.write_text('[permissions]\nallow = ["Bash(touch one)"]\n')
    calls = [step(bash("touch one"))]
    asked = []

    async def play() -> None:
        session = await guarded.script(hutch, calls, "trusting")
        async with log_of(hutch, session) as log:
            await log.play(session, "go", allow)
            asked.append(bool(asked_of(log)))

    await play()
    trusted = await guarded.hutch("policy", "trust", str(folder))
    explained = await guarded.hutch("policy", "explain", "Bash", "touch one", "-C", str(folder), "-o", "json")
    await play()
    file.write_text(file.read_text() + "\n")
    await play()
    await guarded.hutch("policy", "trust", str(folder))
    await guarded.hutch("policy", "distrust", str(folder))
    await play()
    file.unlink()
    gone = await guarded.hutch("policy", "distrust", str(folder))
    lines = await guarded.hutch("audit", "--action", "trust_policy", "-o", "jsonl")

    assert asked == [True, False, True, True]
    assert 'allow = ["Bash(touch one)"]' in trusted.err
    assert explained.json["decision"] == "allow"
    assert "No longer trusted" in gone.err
    outcomes = [json.loads(line)["outcome"] for line in lines.out.splitlines()]
    assert outcomes == ["trusted", "trusted", "distrusted", "distrusted"]


async def test_approve_adds_the_chosen_rule(guarded: Host, hutch: HutchClient) -> None:
    """The rule is added for the session or the project, shown, and can be removed again."""
    folder = guarded.folder("approving")
    lines = [step(bash("npm run test -- x")), step(bash("npm run lint")), step(bash("npm run lint"))]
    session = await guarded.script(hutch, lines, "approving")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        first = await log.asked()
        await guarded.hutch("approve", first.id, "--session")
        second = await log.asked()
        await guarded.hutch("approve", second.id, "--always", "--rule", "Bash(npm run lint)")
        await log.ended(turn)
        shown = await guarded.hutch("policy", "show", "--session", session.id)
        late = await guarded.hutch("approve", second.id, code=1)
    removed = await guarded.hutch("policy", "remove", "allow", "Bash(npm run lint)", "-C", str(folder))

    assert first.suggestions[0].rule in shown.out
    assert "allow Bash(npm run lint)" in shown.out
    assert "It was settled before: allowed by uid" in late.err
    assert removed.err == ""


async def test_the_audit_is_filtered_and_exported(guarded: Host, hutch: HutchClient) -> None:
    """Filters are session, action, outcome and time. Each line has the user or rule, the time and the input."""
    session = await guarded.script(hutch, [step(bash("curl x")), step(bash("touch one")), step(bash("touch two"))])
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await guarded.hutch("approve", (await log.asked()).id)
        await guarded.hutch("deny", (await log.asked()).id)
        await log.ended(turn)
    await guarded.hutch("mode", session.id, "plan")
    every = await guarded.hutch("audit", "--session", session.name, "-o", "jsonl")
    denied = await guarded.hutch("audit", "--session", session.id, "--outcome", "denied", "-o", "jsonl")
    table = await guarded.hutch("audit", "--session", session.id, "--action", "permission")
    none = await guarded.hutch("audit", "--session", session.id, "--since", "2999-01-01T00:00:00Z", "-o", "jsonl")

    lines = [json.loads(line) for line in every.out.splitlines()]
    assert [(line["action"], line["outcome"]) for line in lines] == [
        ("open_session", "opened"),
        ("permission", "denied"),
        ("permission", "allowed"),
        ("permission", "denied"),
        ("set_permission_mode", "plan"),
    ]
    assert lines[1]["rule"] == "Bash(curl:*)"
    assert all("(hutch " in line["actor"] for line in lines[2:])
    assert all(len(line["digest"]) == 64 for line in lines[1:4])
    assert [json.loads(line)["number"] for line in denied.out.splitlines()] == [lines[1]["number"], lines[3]["number"]]
    assert lines[2]["digest"][:12] in table.out
    assert "tool=Bash" in table.out
    assert none.out == ""


async def test_a_directory_behind_a_link_is_the_same_project(guarded: Host, hutch: HutchClient) -> None:
    """Paths are judged after their links are resolved: a link does not evade a rule of the working directory."""
    real = guarded.folder("real")
    link = guarded.work / "link"
    link.symlink_to(real)
    calls = [
        step(("Write", {"file_path": f"{real}/src/a", "content": ""})),
        step(("Write", {"file_path": f"{link}/src/a", "content": ""})),
        step(("Read", {"file_path": "b"})),
    ]
    script = guarded.script_file("linked", calls)
    session = await hutch.open_session(
        m.OpenSession(
            "script",
            str(link),
            permission_mode="bypass",
            rules=m.Rules(deny=("Edit(src/**)",)),
            options=m.AgentOptions(script=script),
        )
    )
    async with log_of(hutch, session) as log:
        await log.play(session, "go")

        assert [result.is_error for result in log.of("tool_result")] == [True, True, False]
        assert (await hutch.get_session(session.id)).cwd == str(real)
        assert Path(script).exists()
