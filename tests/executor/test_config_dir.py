"""The agent's own directory: how it is made and removed, and how a conversation is carried over into it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hutch_executor.account import agent_dir
from hutch_executor.runners.claude.config_dir import ConfigDirectory, transcripts_name
from hutch_shared import messages as m
from hutch_shared.agents import SCRATCH
from hutch_shared.errors import HutchError, Reason
from hutch_shared.removal import remove_tree

ID = "11111111-1111-4111-8111-111111111111"
LINE = b'{"type":"user","slug":"calm-owl"}\n'


def session(root: Path, **more: Any) -> m.PrepareSession:
    return m.PrepareSession(
        "s-1",
        "claude",
        "/proj",
        "ask",
        m.AgentOptions(),
        m.Limits(),
        str(root / "spool" / "x-1"),
        str(root / "home"),
        **more,
    )


@pytest.fixture
def config(tmp_path: Path) -> ConfigDirectory:
    (tmp_path / "spool").mkdir()
    made = ConfigDirectory(session(tmp_path))
    agent_dir.make(made.path)
    return made


def put(directory: Path, data: bytes = LINE, folder: str = "-elsewhere") -> Path:
    """Store a conversation below a configuration directory."""
    path = directory / "projects" / folder / f"{ID}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def copied(config: ConfigDirectory) -> Path:
    return Path(config.path, "projects", transcripts_name("/proj"), f"{ID}.jsonl")


def test_it_lies_beside_the_spools_of_its_account(tmp_path: Path, config: ConfigDirectory) -> None:
    """It is closed to other accounts. hutchd may name another place."""
    assert config.path == str(tmp_path / "spool" / "agents" / "s-1")
    assert os.stat(config.path).st_mode & 0o777 == 0o700
    assert ConfigDirectory(session(tmp_path, agent_dir="/elsewhere")).path == "/elsewhere"


def test_an_unfit_directory_is_refused(tmp_path: Path) -> None:
    """A link, a file, and one in a folder that is open to others."""
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "agents").mkdir(mode=0o700)
    (tmp_path / "agents" / "link").symlink_to(tmp_path / "target")
    (tmp_path / "agents" / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)

    for name in ("agents/link", "agents/file", "open/x", "agents/missing/deep/x"):
        with pytest.raises(HutchError, match=r"must be a directory|cannot be stored") as refused:
            agent_dir.make(str(tmp_path / name))
        assert refused.value.reason is Reason.AGENT_UNAVAILABLE


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o500, 0o000])
def test_a_directory_that_the_agent_opened_is_closed_again(tmp_path: Path, mode: int) -> None:
    """Otherwise one command of the agent would end its session for ever."""
    (tmp_path / "agents").mkdir(mode=0o700)
    made = tmp_path / "agents" / "s-1"
    agent_dir.make(str(made))
    (made / "kept").write_text("")
    made.chmod(mode)

    agent_dir.make(str(made))

    assert made.stat().st_mode & 0o777 == 0o700
    assert (made / "kept").exists()


def test_a_conversation_of_the_users_is_copied(tmp_path: Path, config: ConfigDirectory) -> None:
    """Its plan comes too. The user's files stay as they were."""
    users = put(tmp_path / "home" / ".claude")
    plan = tmp_path / "home" / ".claude" / "plans" / "calm-owl.md"
    plan.parent.mkdir()
    plan.write_text("# plan")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (users, plan)}

    assert config.carry_over(ID, ())

    assert copied(config).read_bytes() == LINE
    assert copied(config).stat().st_mode & 0o777 == 0o600
    assert Path(config.path, "plans", "calm-owl.md").read_text() == "# plan"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


def test_the_own_conversation_is_never_replaced(tmp_path: Path, config: ConfigDirectory) -> None:
    """It has gone on since it was copied, whatever folder it is in."""
    put(tmp_path / "home" / ".claude")
    mine = LINE + b'{"type":"assistant"}\n'
    own = put(Path(config.path), mine)

    assert config.carry_over(ID, ())

    assert own.read_bytes() == mine
    assert not copied(config).exists()


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b'{"type":"summary"}\n'])
def test_a_transcript_without_a_message_does_not_count(tmp_path: Path, config: ConfigDirectory, content: bytes) -> None:
    """The CLI resumes an empty or damaged transcript as if it had a history."""
    put(Path(config.path), content, transcripts_name("/proj"))

    assert not config.carry_over(ID, ())

    put(tmp_path / "home" / ".claude")
    assert config.carry_over(ID, ())
    assert copied(config).read_bytes() == LINE


def test_a_message_after_other_lines_counts(tmp_path: Path, config: ConfigDirectory) -> None:
    """The CLI writes lines of other kinds first, and a damaged line does not hide the message."""
    own = put(Path(config.path), b'{"type":"summary"}\n\0\0\n' + b'{"x":"' + b"x" * 1_000_000 + b'"}\n' + LINE)
    put(tmp_path / "home" / ".claude")
    config.note(ID)

    assert config.noted() == ID
    assert config.carry_over(ID, ())
    assert own.exists()
    assert not copied(config).exists()


def test_another_sessions_directory_comes_first(tmp_path: Path, config: ConfigDirectory) -> None:
    """A fork continues its parent's conversation."""
    put(tmp_path / "home" / ".claude", b"users\n")
    put(tmp_path / "parent", b"parents\n")

    assert config.carry_over(ID, (str(tmp_path / "missing"), str(tmp_path / "parent")))

    assert copied(config).read_bytes() == b"parents\n"


def test_a_torn_last_line_is_left_out(tmp_path: Path, config: ConfigDirectory) -> None:
    """The parent's program may be writing it."""
    put(tmp_path / "home" / ".claude", LINE + b'{"type":"us')

    assert config.carry_over(ID, ())

    assert copied(config).read_bytes() == LINE


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "x" * 200, "-x", "a\0"])
def test_an_odd_name_is_an_unknown_conversation(config: ConfigDirectory, name: str) -> None:
    """The user may send any text."""
    assert not config.carry_over(name, ())


@pytest.mark.parametrize("where", ["file", "folder", "projects"])
def test_a_link_out_of_the_directory_is_not_copied(tmp_path: Path, config: ConfigDirectory, where: str) -> None:
    """An earlier agent could write there: a link leads to what it cannot read itself."""
    hidden = put(tmp_path / "hidden", b"SECRET\n")
    users = tmp_path / "home" / ".claude" / "projects"
    link, target = {
        "file": (users / "-work" / f"{ID}.jsonl", hidden),
        "folder": (users / "-work", hidden.parent),
        "projects": (users, hidden.parents[1]),
    }[where]
    link.parent.mkdir(parents=True)
    link.symlink_to(target)

    assert not config.carry_over(ID, ())
    assert list(Path(config.path).rglob("*.jsonl")) == []


@pytest.mark.parametrize("name", ["projects", f"projects/{transcripts_name('/proj')}", "plans"])
def test_nothing_is_written_through_a_link_that_the_agent_left(
    tmp_path: Path, config: ConfigDirectory, name: str
) -> None:
    """The executor writes outside the sandbox, so the copy must stay in the directory."""
    users = tmp_path / "home" / ".claude"
    put(users)
    (users / "plans").mkdir()
    (users / "plans" / "calm-owl.md").write_text("# plan")
    out = tmp_path / "out"
    out.mkdir()
    Path(config.path, name).parent.mkdir(exist_ok=True)
    Path(config.path, name).symlink_to(out)

    config.carry_over(ID, ())

    assert list(out.iterdir()) == []


@pytest.mark.parametrize("place", [f"{ID}.jsonl", f".{ID}.jsonl.new"])
def test_a_folder_in_the_place_of_the_copy_loses_only_the_conversation(
    tmp_path: Path, config: ConfigDirectory, place: str
) -> None:
    """The session begins a new one; an error would end it for ever."""
    put(tmp_path / "home" / ".claude")
    copied(config).with_name(place).mkdir(parents=True)

    assert not config.carry_over(ID, ())


def test_the_note_of_a_conversation_names_one_of_its_own_with_a_message(
    tmp_path: Path, config: ConfigDirectory
) -> None:
    """The agent can change it: it never leads to another session's conversation, nor out of the directory."""
    note, outside = Path(config.path, "hutch-conversation"), tmp_path / "outside"
    assert config.noted() is None
    put(tmp_path / "home" / ".claude")
    config.note(ID)
    assert config.noted() is None

    put(Path(config.path))
    assert config.noted() == ID
    outside.write_text(ID)
    note.unlink()
    note.symlink_to(outside)
    assert config.noted() is None
    for text in ("", "../x", f"{ID}\n", "\udcff", "x" * 5000):
        note.unlink()
        note.write_text(text, errors="surrogateescape")
        assert config.noted() is None

    note.unlink()
    note.symlink_to(outside)
    config.note(ID)
    assert (config.noted(), note.is_symlink(), outside.read_text()) == (ID, False, ID)
    config.note(None)
    config.note(None)
    assert (config.noted(), note.exists()) == (None, False)


def test_a_pipe_does_not_hold_the_session_up(tmp_path: Path, config: ConfigDirectory) -> None:
    """A reader of a pipe would wait for a writer."""
    users = put(tmp_path / "home" / ".claude")
    users.unlink()
    os.mkfifo(users)

    assert not config.carry_over(ID, ())


def test_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, config: ConfigDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try starts from the beginning; the conversation does not count as lost."""
    put(tmp_path / "home" / ".claude")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(HutchError, match="No space left") as refused:
            config.carry_over(ID, ())

    assert refused.value.reason is Reason.AGENT_UNAVAILABLE
    assert [path for path in Path(config.path).rglob("*") if path.is_file()] == []
    assert config.carry_over(ID, ())


# ---------------------------------------------------------------- temporary files


@pytest.mark.parametrize("left", ["nothing", "a folder", "a file", "a link"])
def test_temporary_files_of_a_killed_executor_are_removed_by_the_next(
    tmp_path: Path, config: ConfigDirectory, left: str
) -> None:
    """The agent can put anything in the folder's place. What a link leads to stays."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    scratch = Path(config.path, "hutch-scratch")
    if left == "a folder":
        (scratch / "deep" / "er").mkdir(parents=True)
        (scratch / "deep").chmod(0)
    elif left == "a file":
        scratch.write_text("")
    elif left == "a link":
        scratch.symlink_to(tmp_path / "kept")

    assert agent_dir.make_scratch(config.path) == str(scratch)

    assert not scratch.is_symlink()
    assert os.listdir(scratch) == []
    assert scratch.stat().st_mode & 0o777 == 0o700
    agent_dir.remove_scratch(config.path)
    agent_dir.remove_scratch(config.path)
    assert not scratch.exists()
    assert (tmp_path / "kept" / "file").exists()


def test_a_folder_for_temporary_files_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """Its session cannot begin."""
    with pytest.raises(HutchError, match=r"cannot be stored in .*gone/hutch-scratch: No such file") as refused:
        agent_dir.make_scratch(str(tmp_path / "gone"))
    assert refused.value.reason is Reason.AGENT_UNAVAILABLE


# ---------------------------------------------------------------- removal


def test_everything_in_a_directory_is_removed(tmp_path: Path) -> None:
    """Of any depth, with any modes; what links lead to stays."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    top = tmp_path / "agents" / "s-1"
    deep = os.open(tmp_path, os.O_RDONLY)
    for name in ("agents", "s-1", *["d"] * 1500):
        os.mkdir(name, dir_fd=deep)
        below = os.open(name, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    (top / "link").symlink_to(tmp_path / "kept")
    (top / "closed").mkdir()
    (top / "closed" / "file").write_text("")
    (top / "closed" / "inner").mkdir()
    (top / "closed" / "inner").chmod(0)
    (top / "closed").chmod(0)

    agent_dir.remove(str(top))
    agent_dir.remove(str(top))

    assert not top.exists()
    assert (tmp_path / "kept" / "file").exists()


def test_only_the_temporary_files_of_a_closed_session_are_removed(tmp_path: Path) -> None:
    """The rest of the directory stays, and so does what a link in their place names."""
    top = tmp_path / "agents" / "s-1"
    scratch = top / SCRATCH
    (scratch / "inside").mkdir(parents=True)
    (tmp_path / "kept").mkdir()

    agent_dir.remove(str(scratch))
    scratch.symlink_to(tmp_path / "kept")
    agent_dir.remove(str(scratch))
    agent_dir.remove(str(scratch))

    assert (list(top.iterdir()), (tmp_path / "kept").exists()) == ([], True)


@pytest.mark.parametrize(
    "path", ["/etc", "/x/agents", "/x/agents/../etc", "/x/agents/a/b", "agents", f"/x/{SCRATCH}", f"/x/y/{SCRATCH}"]
)
def test_only_the_directory_of_an_agent_is_removed(path: str) -> None:
    """hutchd asks for no other."""
    with pytest.raises(HutchError) as refused:
        agent_dir.remove(path)
    assert refused.value.reason is Reason.INVALID_PARAMS


def test_a_link_in_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    """The error is the system's."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")

    with pytest.raises(OSError, match="link"):
        remove_tree(str(tmp_path / "link"))
    assert (tmp_path / "kept").exists()
