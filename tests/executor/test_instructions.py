"""The instruction files that an agent gets, what they import, and what is left out."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import pytest

from hutch_executor.runners.claude.instruction_text import imports_of, rule_of
from hutch_executor.runners.claude.instructions import DEPTH, INSTRUCTIONS_LIMIT, read_instructions
from hutch_executor.sandbox.git_dirs import GitDirs, git_dirs
from hutch_shared import messages as m
from hutch_shared.project_file import read_project_file
from tests.swapping import swapping, write


def instructions(
    cwd: str, home: str, which: Literal["all", "project", "none"] = "all", hidden: tuple[str, ...] = ()
) -> tuple[str, m.Instructions]:
    """Return the text and the list of the files."""
    found = read_instructions(cwd, home, which, hidden)
    return found.text(), found.record()


def text_of(cwd: str, home: str, which: Literal["all", "project", "none"] = "all") -> str:
    return instructions(cwd, home, which)[0]


def read(root: Path, cwd: str = "app", hidden: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """Return the marks (words that begin with MARK) of what is given, and what is left out with the reason."""
    text, record = instructions(str(root / cwd), str(root / "home"), "all", hidden)
    left_out = {os.path.relpath(file.path, root): file.why for file in record.left_out}
    assert len(left_out) == len(record.left_out)
    return [word for word in text.split() if word.startswith("MARK")], left_out


def test_instructions_come_outermost_first_and_stop_at_the_repository(tmp_path: Path) -> None:
    """The account's own file comes first, then the project's. Files above the repository are not read."""
    cwd, home = tmp_path / "up" / "repo" / "sub", tmp_path / "home"
    cwd.mkdir(parents=True)
    (home / ".claude").mkdir(parents=True)
    (tmp_path / "up" / "repo" / ".git").mkdir()
    for path, text in {
        home / ".claude" / "CLAUDE.md": "OWN",
        tmp_path / "up" / "CLAUDE.md": "ABOVE",
        tmp_path / "up" / "repo" / "CLAUDE.md": "OUTER",
        cwd / "CLAUDE.md": "INNER",
        cwd / "CLAUDE.local.md": "LOCAL",
    }.items():
        path.write_text(text)
    text = text_of(str(cwd), str(home))

    assert [word for word in text.split() if word.isupper() and len(word) > 2] == ["OWN", "OUTER", "INNER", "LOCAL"]


@pytest.mark.parametrize(("which", "given"), [("all", ["OWN", "PROJECT"]), ("project", ["PROJECT"]), ("none", [])])
def test_a_setting_selects_the_instruction_files(
    tmp_path: Path, which: Literal["all", "project", "none"], given: list[str]
) -> None:
    """`all`, `project` or `none`."""
    (tmp_path / "home" / ".claude").mkdir(parents=True)
    (tmp_path / "home" / ".claude" / "CLAUDE.md").write_text("OWN")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "CLAUDE.md").write_text("PROJECT")

    text = text_of(str(tmp_path / "app"), str(tmp_path / "home"), which)

    assert [word for word in text.split() if word in ("OWN", "PROJECT")] == given


def test_without_a_repository_only_the_folder_counts(tmp_path: Path) -> None:
    """Folders above it, which others may own, give no instructions."""
    (tmp_path / "CLAUDE.md").write_text("ABOVE")
    (tmp_path / "here").mkdir()

    assert text_of(str(tmp_path / "here"), str(tmp_path / "home")) == ""


def test_a_link_out_of_the_project_is_not_followed(tmp_path: Path) -> None:
    """A repository cannot make Hutch pass other files of the account to the model. Links inside it work."""
    cwd = tmp_path / "repo"
    cwd.mkdir()
    (tmp_path / "private").write_text("PRIVATE")
    (cwd / "CLAUDE.md").symlink_to(tmp_path / "private")
    (cwd / "AGENTS.md").write_text("SHARED")
    (cwd / "CLAUDE.local.md").symlink_to("AGENTS.md")
    text = text_of(str(cwd), str(tmp_path / "home"))

    assert "PRIVATE" not in text
    assert "SHARED" in text


def test_instructions_are_bounded(tmp_path: Path) -> None:
    """A text that is too long is cut and ends with a note."""
    (tmp_path / "CLAUDE.md").write_text("é" * INSTRUCTIONS_LIMIT)
    text = text_of(str(tmp_path), str(tmp_path / "home"))

    assert len(text.encode()) < INSTRUCTIONS_LIMIT + 1000
    assert text.endswith("… (cut)")


# ---------------------------------------------------------------- the input of the field


def test_a_project_like_those_of_the_reports(tmp_path: Path) -> None:
    """Imports and rules are given, once each; the nested file and the link out of the home are left out, and said."""
    write(
        tmp_path,
        {
            "app/CLAUDE.md": "MARK-ROOT\n@docs/style.md\n@AGENTS.md\n",
            "app/docs/style.md": "MARK-IMPORTED-STYLE\n",
            "app/AGENTS.md": "MARK-AGENTS\n",
            "app/.claude/rules/r.md": "MARK-RULES\n",
            "app/sub/CLAUDE.md": "MARK-SUBDIR\n",
            "dotfiles/CLAUDE.md": "MARK-DOTFILES\n",
        },
    )
    (tmp_path / "home" / ".claude").mkdir(parents=True)
    (tmp_path / "home" / ".claude" / "CLAUDE.md").symlink_to("../../dotfiles/CLAUDE.md")

    given, left_out = read(tmp_path)

    assert given == ["MARK-ROOT", "MARK-IMPORTED-STYLE", "MARK-AGENTS", "MARK-RULES"]
    assert left_out == {
        "home/.claude/CLAUDE.md": f"it leads out of {tmp_path}/home",
        "app/sub/CLAUDE.md": "it lies in a subfolder; the agent can read it there",
    }


def test_agents_md_counts_where_there_is_no_claude_md(tmp_path: Path) -> None:
    """In each folder by itself. Beside a CLAUDE.md that does not import it, it is left out."""
    write(
        tmp_path,
        {
            "repo/.git/HEAD": "",
            "repo/AGENTS.md": "MARK-OUTER",
            "repo/a/AGENTS.md": "MARK-INNER",
            "repo/a/CLAUDE.md": "MARK-CLAUDE",
            "repo/b/AGENTS.md": "MARK-B",
            "repo/b/.claude/CLAUDE.md": "MARK-B-CLAUDE",
        },
    )

    assert read(tmp_path, "repo/a") == (
        ["MARK-OUTER", "MARK-CLAUDE"],
        {"repo/a/AGENTS.md": "this folder has a CLAUDE.md, which does not import it"},
    )
    assert read(tmp_path, "repo/b")[0] == ["MARK-OUTER", "MARK-B-CLAUDE"]
    assert list(read(tmp_path, "repo")[1]) == ["repo/a/CLAUDE.md", "repo/b/AGENTS.md"]


def test_rules_say_what_they_apply_to(tmp_path: Path) -> None:
    """They are read in subfolders too. The head of a rule is not given."""
    write(
        tmp_path,
        {
            "app/.claude/rules/a.md": "---\npaths:\n  - 'src/**/*.ts'\n  - \"lib/{a,b}.ts\"\n---\nMARK-TS\n",
            "app/.claude/rules/deep/b.md": '---\ntitle: x\npaths: "**/*.py, docs/*.{md,txt}"\n---\nMARK-PY\n',
            "app/.claude/rules/c.md": "MARK-ALL\n---\npaths: no head\n---\n",
            "app/.claude/rules/d.txt": "MARK-NO-RULE\n",
        },
    )
    text, _ = instructions(str(tmp_path / "app"), str(tmp_path / "home"))

    assert f"{tmp_path}/app/.claude/rules/a.md (for files that match src/**/*.ts, lib/{{a,b}}.ts):\n\nMARK-TS" in text
    assert "b.md (for files that match **/*.py, docs/*.{md,txt}):\n\nMARK-PY" in text
    assert "c.md:\n\nMARK-ALL" in text
    assert "title" not in text
    assert "NO-RULE" not in text


# ---------------------------------------------------------------- imports


def test_imports_are_words_outside_of_code() -> None:
    """Code spans, code blocks and addresses import nothing."""
    text = """See @README.md and @docs/a\\ b.md, or (not here: x@y.org).
@./one.md @../two.md. @~/three.md @/four.md
`@code.md` ``@code ` two.md`` @README.md
```
@block.md
```
~~~python
@other-block.md
```
still @block.md
~~~
- @five.md#part
@ @# @(x) @*
"""

    assert imports_of(text) == [
        *("README.md", "docs/a b.md", "./one.md", "../two.md", "~/three.md", "/four.md", "five.md"),
    ]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "x" + "`" * 30_000 + "a" * 30_000,
        "".join("a" + "`" * (1 + n % 350) for n in range(370)),
        "a`b``" * 13_000,
        "@a" * 32_000,
    ],
    ids=["one long mark", "marks of all lengths", "many marks", "one long word"],
)
def test_a_file_is_searched_in_a_moment_whatever_it_contains(text: str) -> None:
    """An agent can write it, and while it is searched the executor does nothing else."""
    assert "z.md" in imports_of(f"{text[: INSTRUCTIONS_LIMIT - 10]}\n\n@z.md")


def test_a_code_span_ends_at_as_many_marks() -> None:
    """Other marks are in it; a mark without an end is text."""
    assert imports_of("` @a.md `` @b.md ` @c.md ``` @d.md") == ["c.md", "d.md"]


def test_the_head_of_a_rule() -> None:
    """Without a head, or without `paths` in it, a rule applies to all files."""
    assert rule_of("x\n---\ny") == ((), "x\n---\ny")
    assert rule_of("---\na: b\n---\nx") == ((), "x")
    assert rule_of("---\npaths: ['a', \"b\"]\n---\nx") == (("a", "b"), "x")
    assert rule_of("---\npaths: a\nx") == ((), "---\npaths: a\nx")


def test_imports_are_followed_five_deep_and_once(tmp_path: Path) -> None:
    """A circle ends."""
    files = {f"app/{n}.md": f"MARK-{n}\n@{n + 1}.md\n@0.md\n@CLAUDE.md" for n in range(DEPTH + 1)}
    write(tmp_path, {"app/CLAUDE.md": "MARK-ROOT\n@0.md", **files})

    given, left_out = read(tmp_path)

    assert given == ["MARK-ROOT", *(f"MARK-{n}" for n in range(DEPTH))]
    assert left_out == {f"app/{DEPTH}.md": f"imports are followed {DEPTH} deep"}


def test_a_long_list_of_what_is_left_out_says_how_much_is_missing(tmp_path: Path) -> None:
    """An agent can name thousands of files."""
    files = {f"app/{n}.md": "" for n in range(600, 610)}
    write(tmp_path, {"app/CLAUDE.md": " ".join(f"@{n}.md" for n in range(2000)), **files})

    record = instructions(str(tmp_path / "app"), str(tmp_path / "home"), "all", ())[1]

    assert len(record.left_out) == 50
    assert (record.left_out[-1].path, record.left_out[-1].why) == ("…", "460 more files are left out")


def test_imports_of_the_working_directory_stay_in_it(tmp_path: Path) -> None:
    """The agent can write its CLAUDE.md, but sees nothing of the repository outside of its directory."""
    write(
        tmp_path,
        {
            "repo/.git/HEAD": "",
            "repo/secret.md": "MARK-SECRET",
            "home/notes.md": "MARK-NOTES",
            "repo/app/sub/a.md": "MARK-A\n@../b.md",
            "repo/app/b.md": "MARK-B",
            "repo/app/CLAUDE.md": f"@../secret.md @sub/a.md @~/notes.md @{tmp_path}/repo/secret.md @missing.md"
            f" @sub/../../secret.md @{tmp_path}/repo/app/b.md @somebody",
        },
    )
    (tmp_path / "repo" / "app" / "link.md").symlink_to("../secret.md")
    (tmp_path / "repo" / "app" / "CLAUDE.local.md").write_text("@link.md @sub")

    given, left_out = read(tmp_path, "repo/app")

    assert given == ["MARK-A", "MARK-B"]
    assert set(left_out) == {
        *("repo/secret.md", "home/notes.md", "repo/app/missing.md", "repo/app/link.md", "repo/app/sub"),
    }
    assert "lies outside of" in left_out["repo/secret.md"]
    assert "does not exist" in left_out["repo/app/missing.md"]


def test_a_file_above_imports_what_is_below_its_own_folder(tmp_path: Path) -> None:
    """An agent in `repo/docs` may have written that file, and sees nothing else. No link is followed either."""
    write(
        tmp_path,
        {
            "repo/.git/HEAD": "",
            "repo/CLAUDE.md": "MARK-OUTER @docs/a.md @docs/link.md",
            "repo/docs/a.md": "MARK-A @../secret.md @more/b.md",
            "repo/docs/more/b.md": "MARK-B @../a.md @../../secret.md",
            "repo/secret.md": "MARK-SECRET",
            "repo/app/x": "",
        },
    )
    (tmp_path / "repo" / "docs" / "link.md").symlink_to("../secret.md")

    given, left_out = read(tmp_path, "repo/app")

    assert given == ["MARK-OUTER", "MARK-A", "MARK-B"]
    assert set(left_out) == {"repo/secret.md", "repo/docs/link.md"}


def test_a_file_above_may_be_one_link(tmp_path: Path) -> None:
    """`CLAUDE.md` is often a link to `AGENTS.md`. An agent could change what a second link leads to."""
    write(tmp_path, {"repo/.git/HEAD": "", "repo/AGENTS.md": "MARK-AGENTS", "repo/secret.md": "MARK-X", "repo/w/x": ""})
    (tmp_path / "repo" / "CLAUDE.md").symlink_to("AGENTS.md")

    assert read(tmp_path, "repo/w")[0] == ["MARK-AGENTS"]

    (tmp_path / "repo" / "AGENTS.md").unlink()
    (tmp_path / "repo" / "AGENTS.md").symlink_to("secret.md")

    assert read(tmp_path, "repo/w")[0] == []


def test_the_users_own_file_imports_from_the_home(tmp_path: Path) -> None:
    """It may be a link too, as files kept in a repository are. What it imports imports less."""
    write(
        tmp_path,
        {
            "home/dotfiles/CLAUDE.md": "MARK-OWN",
            "home/.claude/rules/r.md": "MARK-RULE @~/notes/n.md",
            "home/notes/n.md": "MARK-NOTES @~/secret.md",
            "home/secret.md": "MARK-SECRET",
            "app/x": "",
        },
    )
    (tmp_path / "home" / ".claude" / "CLAUDE.md").symlink_to("../dotfiles/CLAUDE.md")

    given, left_out = read(tmp_path)

    assert given == ["MARK-OWN", "MARK-RULE", "MARK-NOTES"]
    assert set(left_out) == {"home/secret.md"}


def test_the_accounts_own_file_is_none_of_a_project(tmp_path: Path) -> None:
    """Although the home is a repository, and the setting chooses the project's files alone."""
    write(tmp_path, {"home/.git/HEAD": "", "home/.claude/CLAUDE.md": "OWN", "home/.claude/rules/r.md": "OWN"})
    (tmp_path / "home" / "app").mkdir()

    assert text_of(str(tmp_path / "home" / "app"), str(tmp_path / "home"), "project") == ""


@pytest.mark.parametrize("name", ["app/private", "app/private/", "app/./private", "link/private", "hidden"])
def test_what_the_settings_hide_is_not_given(tmp_path: Path, name: str) -> None:
    """The sandbox hides it from the agent, which could import it. The settings may name it by a link."""
    write(tmp_path, {"app/CLAUDE.md": "MARK-ROOT @private/a.md", "app/private/a.md": "MARK-SECRET"})
    (tmp_path / "link").symlink_to("app")
    (tmp_path / "hidden").symlink_to("app/private")

    given, left_out = read(tmp_path, hidden=(f"{tmp_path}/{name}",))

    assert (given, list(left_out)) == (["MARK-ROOT"], ["app/private/a.md"])


def test_odd_files_are_left_out_with_the_reason(tmp_path: Path) -> None:
    """Nothing waits or fails: a pipe, a folder, a link to nothing, a loop, bytes, a name that is not UTF-8."""
    write(tmp_path, {"app/CLAUDE.md": "MARK-ROOT @pipe.md @folder.md @loop.md @bytes.md", "app/bytes.md": "a\0b"})
    app = tmp_path / "app"
    os.mkfifo(app / "pipe.md")
    (app / "folder.md").mkdir()
    (app / "loop.md").symlink_to("loop.md")
    (app / "CLAUDE.local.md").symlink_to("nothing")
    odd = os.fsencode(app) + b"/caf\xe9"
    os.mkdir(odd)
    with open(odd + b"/CLAUDE.md", "wb") as file:
        file.write(b"x")

    given, left_out = read(tmp_path)

    assert given == ["MARK-ROOT"]
    assert left_out == {
        "app/pipe.md": "it is not a regular file",
        "app/folder.md": "it is a directory",
        "app/loop.md": "it is a symbolic link, or lies behind one",
        "app/bytes.md": "it is not a text",
        "app/CLAUDE.local.md": "it is a link to nothing",
        "app/caf\ufffd/CLAUDE.md": "it lies in a subfolder; the agent can read it there",
    }


def test_a_file_whose_name_is_not_utf_8_is_left_out(tmp_path: Path) -> None:
    """Rules judge a path as text. Two such names would have one text, and only one of the files would be judged."""
    write(tmp_path, {"app/CLAUDE.md": "MARK-ROOT @odd.md", "app/secret.md": "MARK-SECRET", "app/ok.md": "MARK-OK"})
    rules = os.fsencode(tmp_path / "app") + b"/.claude/rules/"
    os.makedirs(rules)
    os.symlink(b"../../secret.md", rules + b"a\xfe.md")
    os.symlink(b"../../ok.md", rules + b"a\xff.md")
    with open(os.fsencode(tmp_path) + b"/app/odd\xfe.md", "wb") as file:
        file.write(b"MARK-ODD")
    os.symlink(b"odd\xfe.md", tmp_path / "app" / "odd.md")

    found = read_instructions(str(tmp_path / "app"), str(tmp_path / "home"))

    assert found.named() == {str(tmp_path / "app" / "CLAUDE.md"): str(tmp_path / "app" / "CLAUDE.md")}
    assert [word for word in found.text().split() if word.startswith("MARK")] == ["MARK-ROOT"]
    assert {file.why for file in found.record().left_out} == {"its name is not UTF-8"}
    assert len(found.record().left_out) == 3


def test_the_list_and_the_search_are_bounded(tmp_path: Path) -> None:
    """A project may have any number of files."""
    imports = " ".join(f"@f{n}.md" for n in range(2000))
    write(tmp_path, {"app/CLAUDE.md": imports, **{f"app/f{n}.md": "MARK" for n in range(300)}})
    for n in range(30):
        write(tmp_path, {f"app/s{n}/CLAUDE.md": "x"})

    _, record = instructions(str(tmp_path / "app"), str(tmp_path / "home"))

    assert len(record.given) == 100
    assert len(record.left_out) == 50


# ---------------------------------------------------------------- the race


@pytest.mark.parametrize("folder", [".claude-work", "dotfiles"])
def test_an_own_file_that_is_a_link_imports_only_from_below_where_it_leads(tmp_path: Path, folder: str) -> None:
    """Its folder may be a project of its own."""
    imports = "MARK-OWN @near.md @~/far.md"
    write(tmp_path / "home", {f"{folder}/CLAUDE.md": imports, f"{folder}/near.md": "MARK-NEAR", "far.md": "MARK-FAR"})
    write(tmp_path, {"home/.claude/x": "", "app/x": ""})
    (tmp_path / "home" / ".claude" / "CLAUDE.md").symlink_to(f"../{folder}/CLAUDE.md")

    given, left_out = read(tmp_path)

    assert given == ["MARK-OWN", "MARK-NEAR"]
    assert list(left_out) == ["home/far.md"]


def test_a_path_gives_one_file_although_what_it_leads_to_is_exchanged(tmp_path: Path) -> None:
    """A decision names the path, and is about one file."""
    importers = [f"docs/{number}.md" for number in range(40)]
    write(tmp_path, {"app/CLAUDE.md": " ".join(f"@{name}" for name in importers), "app/link.md": "MARK-A"})
    write(tmp_path, {"app/b.md": "MARK-B", **{f"app/{name}": "@../link.md" for name in importers}})
    end = time.monotonic() + 2
    with swapping(tmp_path / "app", ["link.md"], [tmp_path / "app" / "b.md"], 0.0005):
        while time.monotonic() < end:
            found = read_instructions(str(tmp_path / "app"), str(tmp_path / "home"))

            assert len({**found.named(), **found.imported()}) == len(found.given)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.full)])
def test_no_foreign_byte_is_given_while_files_and_folders_are_flipped(tmp_path: Path, seconds: int) -> None:
    """An agent exchanges CLAUDE.md, an import, `.git` and every folder above for links, again and again."""
    inner = ("CLAUDE.md", "docs/a.md", "docs/deep/b.md", ".claude/CLAUDE.md", ".claude/rules/r.md")
    own = ["repo/.git/HEAD", "repo/CLAUDE.md", "repo/docs/a.md", "repo/mid/CLAUDE.md", "repo/mid/docs/a.md"]
    own += ["repo/mid/app/.hutch/policy.toml"]
    own += [*(f"repo/mid/app/{name}" for name in inner), "home/.claude/CLAUDE.md", "home/docs/a.md"]
    imports = "@docs/a.md @docs/deep/b.md @~/docs/a.md"
    write(tmp_path, dict.fromkeys(own, f"MARK-OWN {imports}"))
    for depth in range(4):  # what a link leads to has files of the same names
        write(tmp_path / "foreign", {name.split("/", depth)[-1]: f"FOREIGN {imports}" for name in own})
    targets = [tmp_path / "foreign", *(path for path in (tmp_path / "foreign").rglob("*"))]
    cwd = str(tmp_path / "repo" / "mid" / "app")
    rounds = whole = 0
    end = time.monotonic() + seconds
    with swapping(tmp_path, [name for name in own if not name.startswith("home/")], targets, 0.001):
        while time.monotonic() < end:
            text, record = instructions(cwd, str(tmp_path / "home"))
            rounds += 1
            whole += len(record.given) == len(own) - 2
            policy = read_project_file(cwd)
            assert "FOREIGN" not in f"{text} {record} {policy}"
            assert git_dirs(cwd) == GitDirs()
    print(f"{rounds} readings, {whole} of them whole")

    assert rounds > 20
    assert whole > 0, "everything is read while nothing is exchanged"
