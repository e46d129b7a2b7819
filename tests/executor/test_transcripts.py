"""What transcripts show about a prompt: only a complete look shows that none has it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hutch_executor.runners.claude.prompt import prompt_uuid
from hutch_executor.runners.claude.transcripts import keeps_turn, lacks_prompt
from tests.swapping import swapping, write

UUID = prompt_uuid("t-1")


def test_a_prompt_is_found_in_any_transcript(tmp_path: Path) -> None:
    """In the folder of each working directory, and across the borders of what is read at once."""
    (tmp_path / "projects" / "project").mkdir(parents=True)
    (tmp_path / "projects" / "one.jsonl").write_text('{"uuid":"another"}\n')
    assert lacks_prompt(str(tmp_path), UUID)

    for name, before in (("one.jsonl", 0), ("project/two.jsonl", 0), ("project/two.jsonl", (1 << 20) - 7)):
        (tmp_path / "projects" / name).write_text(f"{'x' * before}{UUID}\n")
        assert not lacks_prompt(str(tmp_path), UUID), (name, before)
        assert lacks_prompt(str(tmp_path), prompt_uuid("t-2"))
        (tmp_path / "projects" / name).write_text("")


def test_a_missing_directory_lacks_every_prompt(tmp_path: Path) -> None:
    """No conversation was stored."""
    assert lacks_prompt(str(tmp_path / "none"), UUID)


def test_what_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    """A link, a pipe and a directory in the place of a transcript, and too many names."""
    many = tmp_path / "projects" / "many"
    many.mkdir(parents=True)
    for put in (lambda path: path.symlink_to("/dev/null"), os.mkfifo, Path.mkdir):
        path = many / "a.jsonl"
        put(path)
        assert not lacks_prompt(str(tmp_path), UUID)
        path.rmdir() if path.is_dir() else path.unlink()
    for number in range(10_001):
        os.close(os.open(many / str(number), os.O_CREAT))
    assert not lacks_prompt(str(tmp_path), UUID)


def test_a_transcript_that_disappears_before_it_is_read_shows_nothing(tmp_path: Path) -> None:
    """Another program may rename or remove transcripts, and folders of them, at any moment."""
    write(tmp_path / "projects", {"a/x.jsonl": "{}", "z/prompt.jsonl": UUID})
    write(tmp_path / "projects", {f"a/{number}.jsonl": "{}" for number in range(50)})
    end, lacking = time.monotonic() + 1, 0
    with swapping(tmp_path / "projects", ["a/x.jsonl"], [tmp_path / "missing"], 0.0005):
        while time.monotonic() < end:
            lacking += lacks_prompt(str(tmp_path), UUID)

    assert lacking == 0


def test_the_uuid_of_a_prompt_follows_from_its_turn() -> None:
    """Every executor computes the same one; another turn has another."""
    assert prompt_uuid("t-1") == "eadd987b-bf58-5737-ad82-3b213376426d"
    assert prompt_uuid("t-1") != prompt_uuid("t-2")


def test_a_turn_is_kept_once_a_transcript_has_its_prompt_and_an_answer(tmp_path: Path) -> None:
    """The answer is a whole line after the prompt, in a transcript of this conversation."""
    folder = tmp_path / "projects" / "project"
    folder.mkdir(parents=True)
    file = folder / "c-1.jsonl"
    answer = '{"type":"assistant","message":{}}\n'
    prompt = f'{{"type":"user","uuid":"{UUID}"}}\n'
    reply = f'{{"parentUuid":"{UUID}","type":"assistant","message":{{}}}}\n'
    long = f'{{"type":"user","text":"{"x" * (5 << 20)}"}}\n'
    texts = {
        "": (False, False),
        answer: (False, False),
        prompt: (True, False),
        answer + prompt: (True, False),
        prompt + answer[:-1]: (True, False),
        prompt + answer: (True, True),
        prompt + answer + long: (True, True),
        answer + prompt + long: (True, False),
        long + prompt: (True, False),
        long + prompt + answer: (True, True),
        prompt + long + reply: (True, True),
    }
    found = {}
    for text in texts:
        file.write_text(text)
        found[text] = tuple(keeps_turn(str(tmp_path), "c-1", UUID, answered=one) for one in (False, True))

    assert found == texts
    assert not keeps_turn(str(tmp_path), "c-2", UUID, answered=False)
    assert not keeps_turn(str(tmp_path / "none"), "c-1", UUID, answered=False)


def test_a_transcript_that_cannot_be_looked_at_is_no_evidence_of_a_lost_turn(tmp_path: Path) -> None:
    """The agent put a link in its place."""
    folder = tmp_path / "projects" / "project"
    folder.mkdir(parents=True)
    (folder / "c-1.jsonl").symlink_to("/dev/null")

    assert keeps_turn(str(tmp_path), "c-1", UUID, answered=True)
