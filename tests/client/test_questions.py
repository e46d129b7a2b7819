from __future__ import annotations

import pytest

from hutch_client.questions import answers_by_name, chosen, editable, edited, read_reply


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("y\n", {"decision": "allow"}),
        ("YES", {"decision": "allow"}),
        ("s", {"decision": "allow", "scope": "session"}),
        ("a", {"decision": "allow", "scope": "always"}),
        ("e", "edit"),
        ("n", {"decision": "deny"}),
        ("n use pnpm instead", {"decision": "deny", "message": "use pnpm instead"}),
        ("x", {"decision": "deny", "interrupt": True}),
        ("x enough", {"decision": "deny", "interrupt": True, "message": "enough"}),
    ],
)
def test_a_word_decides(line: str, reply: object) -> None:
    """After a denial the rest of the line is a message; no other decision takes one."""
    assert read_reply(line) == reply


@pytest.mark.parametrize("line", ["", "\n", "  ", "what?", "y please", "a b", "e it", "yn"])
def test_any_other_line_decides_nothing(line: str) -> None:
    """Neither an unknown word nor an empty line decides anything."""
    assert read_reply(line) is None


@pytest.mark.parametrize(
    ("line", "several", "answer"),
    [
        ("2", False, "Blue"),
        ("blue", False, "Blue"),
        ("a warm grey", False, "a warm grey"),
        ("1, 2", True, ["Red", "Blue"]),
        ("red,teal", True, ["Red", "teal"]),
        ("3", False, None),
        ("0", False, None),
        ("", False, None),
        (" , ", True, None),
    ],
)
def test_choices_are_taken_by_number_name_or_own_words(line: str, several: bool, answer: object) -> None:
    """A number that names no choice is no answer."""
    assert chosen(["Red", "Blue"], line, several=several) == answer


def test_a_command_is_edited_as_it_is_and_keeps_the_other_parameters() -> None:
    """Only the final line break, which the editor adds, is removed."""
    given = {"command": "ls", "timeout": 5}

    assert editable(given) == ("ls\n", ".sh")
    assert edited(given, "ls -l\n") == {"command": "ls -l", "timeout": 5}


def test_another_input_is_edited_as_json() -> None:
    """The edited text must be a JSON object."""
    given = {"file_path": "/w/é", "content": "x"}
    text, suffix = editable(given)

    assert suffix == ".json"
    assert edited(given, text) == given
    for broken in ("", "[]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": 1, "a": 2}', "[" * 100_000):
        with pytest.raises((ValueError, RecursionError), match=r"."):
            edited(given, broken)


@pytest.mark.parametrize(
    ("labels", "line", "several", "answer"),
    [
        (["10", "20"], "20", False, "20"),
        (["10", "20"], "2", False, "20"),
        (["10", "20"], "3", False, None),
        (["Red"], "9" * 5000, False, None),
        (["Go, fast", "Rust"], "go, fast", True, ["Go, fast"]),
        (["Go, fast", "Rust"], "2, 1", True, ["Rust", "Go, fast"]),
        (["a", "A"], "a", False, "a"),
    ],
)
def test_odd_labels_can_be_chosen(labels: list[str], line: str, several: bool, answer: str | list[str] | None) -> None:
    """A label may be a number or contain a comma; a number that is shown counts first."""
    assert chosen(labels, line, several=several) == answer


@pytest.mark.parametrize(
    ("questions", "names"),
    [
        (["Which?", "Why?"], ["Which?", "Why?"]),
        (["Which?", "Which?", "Why?"], ["1", "2", "Why?"]),
        (["2", "Why?"], ["1", "Why?"]),
        (["3", "Why?"], ["3", "Why?"]),
    ],
)
def test_each_answer_names_one_question(questions: list[str], names: list[str]) -> None:
    """A question is named by its text, or by its position if the text could name another one."""
    answers = [f"answer {at}" for at in range(len(questions))]

    assert answers_by_name(questions, answers) == dict(zip(names, answers, strict=True))
