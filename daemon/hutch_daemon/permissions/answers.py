"""Checks a user's answers against an agent's questions. Pure.

A question is named by its position (`"1"` is the first), by its whole text, or by a header that no other question has.
A name is read in this order, so a position never names anything else. Every question needs an answer and nothing else
may be answered: an answer that is lost, or that reaches another question, would decide something that no user decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["answers_by_text"]

_SHOWN: Final = 80
"""Characters of a client's or agent's text that an error repeats."""

Answer = str | list[str]


def answers_by_text(questions: Sequence[m.Question], given: Mapping[str, Any] | None) -> dict[str, Answer]:
    """Return the answers by the whole text of their question. `invalid_params` if they do not answer the questions.

    An answer is a text that is not blank or, if the question allows several, a list of such texts.
    """
    if not questions:
        raise _unfit("The agent asked no question that can be answered here. The request can only be denied.")
    found: dict[int, Answer] = {}
    for name, value in (given or {}).items():
        for at in _named(questions, name):
            if at in found:
                raise _unfit(f"Question {at + 1} is answered twice: the second time as {_cut(name)}.")
            found[at] = _answer(at, questions[at], value)
    missing = [f"{at + 1} ({_cut(one.question)})" for at, one in enumerate(questions) if at not in found]
    if missing:
        raise _unfit(f"No answer for question {', '.join(missing)}.")
    answers: dict[str, Answer] = {}
    for at, question in enumerate(questions):
        if answers.setdefault(question.question, found[at]) != found[at]:
            raise _unfit(
                f"The agent asked {_cut(question.question)} twice, and it cannot tell two answers apart: give both the"
                " same answer."
            )
    return answers


def _named(questions: Sequence[m.Question], name: str) -> list[int]:
    """Return the indexes of the questions that `name` names: one, or all with that text. `invalid_params` if none."""
    if name in (positions := [str(at + 1) for at in range(len(questions))]):
        return [positions.index(name)]
    if texts := [at for at, one in enumerate(questions) if one.question == name]:
        return texts
    headers = [at for at, one in enumerate(questions) if one.header == name]
    if len(headers) == 1 and name:
        return headers
    if headers and name:
        raise _unfit(f"{len(headers)} questions have the header {_cut(name)}: name them by position or by their text.")
    raise _unfit(
        f"{_cut(name)} is not one of the questions: name each by its position (1 to {len(questions)}) or text."
    )


def _answer(at: int, question: m.Question, value: Any) -> Answer:
    if _is_text(value):
        return str(value)
    if question.several and isinstance(value, list) and value and all(map(_is_text, value)):
        return list(value)
    expected = "a text, or a list of texts," if question.several else "one text"
    raise _unfit(f"The answer to question {at + 1} ({_cut(question.question)}) must be {expected} that is not blank.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _unfit(sentence: str) -> HutchError:
    return HutchError(Reason.INVALID_PARAMS, sentence)
