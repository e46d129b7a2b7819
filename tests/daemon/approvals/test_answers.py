"""Answers to an agent's questions: what fits is accepted and reaches the agent, anything else changes nothing."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import msgspec
import pytest

from hutch_client.questions import answers_by_name
from hutch_daemon.permissions import requests
from hutch_daemon.permissions.answers import answers_by_text
from hutch_executor.runners.claude.calls import judged_input
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from hutch_shared.vocabulary import to_questions
from tests.daemon.approvals.test_requests import request_row
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import Stage
from tests.sampling import seed

DROP = m.Question("Drop table users?", "DB", (m.Choice("Yes"), m.Choice("No")))
BACK_UP = m.Question("Back up first?", "Backup", (m.Choice("Yes"), m.Choice("No")))
UNFIT = ({"nonsense": "Yes"}, {"DB": "No"}, {"DB": None, "Backup": "Yes"}, {"DB": {"a": 1}, "Backup": []})
PARTS = m.Question("Which parts?", "Parts", (m.Choice("a"), m.Choice("b")), several=True)


def refused(questions: tuple[m.Question, ...], answers: Any) -> str:
    """Return the sentence with which answers are refused."""
    with pytest.raises(HutchError) as error:
        answers_by_text(questions, answers)
    assert error.value.reason is Reason.INVALID_PARAMS
    return error.value.message


@pytest.mark.parametrize(
    "answers",
    [
        {"1": "No", "2": "Yes"},
        {"Drop table users?": "No", "Back up first?": "Yes"},
        {"DB": "No", "Backup": "Yes"},
        {"2": "Yes", "DB": "No"},
    ],
)
def test_a_question_is_named_by_position_text_or_header(answers: dict[str, Any]) -> None:
    """The record and the agent have the answers by the questions' whole texts."""
    assert answers_by_text((DROP, BACK_UP), answers) == {"Drop table users?": "No", "Back up first?": "Yes"}


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"nonsense": "Yes"}, "'nonsense' is not one of the questions"),
        ({"DB": "No"}, "No answer for question 2 ('Back up first?')."),
        ({"DB": None, "Backup": "Yes"}, "The answer to question 1"),
        ({"DB": {"a": 1}, "Backup": []}, "The answer to question 1"),
        ({"DB": "No", "Backup": ["Yes"]}, "must be one text"),
        ({"DB": "No", "Backup": " \n"}, "not blank"),
        ({"DB": "No", "Backup": True}, "must be one text"),
        ({"DB": "No", "1": "Yes", "2": "Yes"}, "Question 1 is answered twice"),
        ({"DB": "No", "Backup": "Yes", "3": "x"}, "'3' is not one of the questions"),
        ({"0": "No", "1": "Yes"}, "'0' is not one of the questions"),
        ({"DB": "No", "": "Yes"}, "'' is not one of the questions"),
        ({}, "No answer for question 1 ('Drop table users?'), 2 ('Back up first?')."),
        (None, "No answer for question 1"),
    ],
)
def test_answers_that_do_not_fit_are_refused(answers: Any, why: str) -> None:
    """The refusal says which question has no answer, or what was named or given wrongly."""
    assert why in refused((DROP, BACK_UP), answers)


def test_a_question_that_allows_several_takes_one_text_or_a_list() -> None:
    """Each of its texts may be a choice or the user's own words; an empty list is no answer."""
    assert answers_by_text((PARTS,), {"1": ["a", "neither"]}) == {"Which parts?": ["a", "neither"]}
    assert answers_by_text((PARTS,), {"1": "a"}) == {"Which parts?": "a"}
    for answer in ([], ["a", ""], ["a", 1], [["a"]], {"a": "b"}):
        assert "a text, or a list of texts" in refused((PARTS,), {"1": answer})


def test_a_header_that_two_questions_have_names_neither() -> None:
    """Otherwise one answer would reach the wrong question, or both."""
    same = (m.Question("Delete the old table?", "DB"), m.Question("Make a backup?", "DB"))

    assert "2 questions have the header 'DB'" in refused(same, {"DB": "No"})
    assert answers_by_text(same, {"1": "No", "2": "Yes"}) == {"Delete the old table?": "No", "Make a backup?": "Yes"}


def test_a_question_asked_twice_needs_one_answer() -> None:
    """The agent hears answers by the question's text, so two different ones could not be told apart."""
    twice = (m.Question("Sure?", "A"), m.Question("Sure?", "B"))

    assert "the same answer" in refused(twice, {"1": "Yes", "2": "No"})
    assert answers_by_text(twice, {"A": "Yes", "B": "Yes"}) == {"Sure?": "Yes"}
    assert answers_by_text(twice, {"Sure?": "Yes"}) == {"Sure?": "Yes"}


def test_a_position_never_names_another_question() -> None:
    """An agent that calls its first question `2` does not swap the answers."""
    swapped = (m.Question("2"), m.Question("1"))

    assert answers_by_text(swapped, {"1": "first", "2": "second"}) == {"2": "first", "1": "second"}
    assert answers_by_text(swapped, answers_by_name(["2", "1"], ["first", "second"])) == {"2": "first", "1": "second"}


def test_a_request_without_a_question_can_only_be_denied() -> None:
    """An agent that asks nothing readable gets no answer."""
    assert "can only be denied" in refused((), {})


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("tool", {"decision": "allow", "answers": {"1": "Yes"}}),
        ("tool", {"decision": "deny", "updated_input": {"command": "ls"}}),
        ("question", {"decision": "answer", "answers": {"1": "Yes"}, "updated_input": {"questions": []}}),
        ("question", {"decision": "answer", "answers": {"1": "Yes"}, "scope": "always"}),
        ("tool", {"decision": "allow", "rule": "Bash(make:*)"}),
    ],
)
def test_a_field_that_the_decision_does_not_use_is_refused(kind: m.PermissionKind, answer: dict[str, Any]) -> None:
    """Its sender would take it as decided."""
    with pytest.raises(HutchError) as error:
        requests.check_answer(request_row(kind=kind, questions=(DROP,)), m.AnswerPermission("p-1", **answer))

    assert error.value.reason is Reason.INVALID_PARAMS


async def test_a_question_stays_pending_until_an_answer_fits(stage: Stage) -> None:
    """Each answer of the case is refused, and the next one that fits reaches the executor by the questions' texts."""
    heard: list[m.PermissionDecision] = []

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        call = m.ToolCall("c-1", "question", "AskUserQuestion", {"questions": []})
        heard.append(await executor.ask(call, kind="question", questions=(DROP, BACK_UP)))
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = play
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()

        for answers in UNFIT:
            with pytest.raises(HutchError) as error:
                await stage.answer(asked, "answer", answers=answers)
            assert error.value.reason is Reason.INVALID_PARAMS
            assert (await stage.pending()).id == asked.id
        assert "permission_settled" not in await stage.kinds(session)
        settled = await stage.answer(asked, "answer", answers={"DB": "No", "2": "Yes"})
        await stage.ended(turn)

        assert heard[0].answers == {"Drop table users?": "No", "Back up first?": "Yes"}
        assert settled.answers == heard[0].answers


# ---------------------------------------------------------------- generated answers


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1e300, 2**63, -(2**63), "", " ", "\x00", "Yes", "No", "None", "é" * 9000, "😀"),
    *([], ["Yes"], ["a", "b"], [""], [None], [["a"]], {}, {"a": 1}, {"1": "Yes"}, [{"label": "Yes"}]),
)
NAMES = ("1", "2", "3", "0", "-1", "01", " 1", "DB", "db", "Backup", "Sure?", "Which?", "", "questions", "None", "１")


def _questions(random: Random) -> list[dict[str, Any]]:
    return [
        {
            "question": random.choice(["Sure?", "Which?", "1", "2", "DB", "Backup", "Delete?", "x" * 5000]),
            "header": random.choice(["", "DB", "Backup", "1", "Sure?"]),
            "multiSelect": random.random() < 0.4,
            "options": [{"label": "Yes"}, {"label": "No"}],
        }
        for _ in range(random.randint(0, 4))
    ]


def _sound(value: Any, *, several: bool) -> bool:
    if isinstance(value, list):
        return several and len(value) > 0 and all(isinstance(one, str) and one.strip() != "" for one in value)
    return isinstance(value, str) and value.strip() != ""


def _meant(questions: list[m.Question], answers: dict[str, Any]) -> list[Any] | None:
    """Return the answer that each question gets; None if the answers do not fit. The specification, written plainly."""
    slots: list[list[Any]] = [[] for _ in questions]
    for name, value in answers.items():
        by_position = [at for at in range(len(questions)) if name == f"{at + 1}"]
        by_text = [at for at, one in enumerate(questions) if one.question == name]
        by_header = [at for at, one in enumerate(questions) if name and one.header == name]
        named = by_position or by_text or by_header
        if not named or (named == by_header and not by_text and not by_position and len(by_header) > 1):
            return None
        for at in named:
            slots[at].append(value)
    if not slots or any(len(slot) != 1 for slot in slots):
        return None
    if any(not _sound(slot[0], several=one.several) for slot, one in zip(slots, questions, strict=True)):
        return None
    for at, one in enumerate(questions):
        if slots[at] != slots[[other.question for other in questions].index(one.question)]:
            return None
    return [slot[0] for slot in slots]


def variants(count: int, number: int) -> tuple[int, int]:
    """Send odd answers to odd questions as a client would; return how many were accepted and how many refused."""
    random = Random(number)
    accepted, reasons = 0, {Reason.INVALID_PARAMS}
    for at in range(count):
        tool_input = {"questions": _questions(random)}
        questions = list(to_questions(tool_input))
        answers: Any = {str(one + 1): "Yes" for one in range(len(questions))}
        for _ in range(random.choice([0, 1, 1, 2])):
            name = random.choice([*NAMES, *(one.question for one in questions), *(one.header for one in questions)])
            if answers and random.random() < 0.5:
                moved = answers.pop(random.choice(list(answers)))
                answers[name] = random.choice([moved, random.choice(ODD)])
            else:
                answers[name] = random.choice(ODD)
        frame: dict[str, Any] = {"permission": "p-1", "decision": "answer", "answers": answers}
        if random.random() < 0.2:
            field = random.choice(["permission", "decision", "scope", "rule", "updated_input", "answers", "interrupt"])
            frame[field] = random.choice(ODD)
        before = copy.deepcopy(frame)
        row = request_row(
            kind="question",
            questions=tuple(questions),
            call=m.ToolCall("c-1", "question", "AskUserQuestion", tool_input),
            digest=input_digest("AskUserQuestion", tool_input),
        )
        meant = _meant(questions, frame["answers"]) if isinstance(frame["answers"], dict) else None
        try:
            params = msgspec.json.decode(json.dumps(frame), type=m.AnswerPermission)
            requests.check_answer(row, params)
            settlement = requests.settlement_of_answer(row, params, "uid 1", None, None)
        except (msgspec.DecodeError, HutchError) as error:
            reasons.add(error.reason if isinstance(error, HutchError) else Reason.INVALID_PARAMS)
            untouched = set(frame) == {"permission", "decision", "answers"} and frame["decision"] == "answer"
            assert meant is None or not (untouched and isinstance(frame["permission"], str)), f"variant {at}: {before}"
            continue
        accepted += 1
        if params.decision == "deny":
            continue
        assert meant is not None, f"variant {at} was accepted: {before}"
        decision = requests.standing(settlement.applied_to(row, 1))
        heard = judged_input("AskUserQuestion", decision)
        assert heard is not None, f"variant {at} reaches no agent: {before}"
        for question, value in zip(questions, meant, strict=True):
            expected = value if isinstance(value, str) else ", ".join(value)
            assert heard["answers"][question.question] == expected, f"variant {at}: {before}"
        assert len(heard["answers"]) == len({one.question for one in questions})
    assert reasons == {Reason.INVALID_PARAMS}
    return accepted, count - accepted


def test_only_answers_that_fit_are_accepted() -> None:
    """Of 500 odd answers, those that fit every question are accepted, and the agent hears exactly these."""
    print(f"seed {seed()}")

    accepted, refusals = variants(500, seed())

    assert accepted > 50, f"seed {seed()}"
    assert refusals > 50, f"seed {seed()}"


@pytest.mark.full
def test_only_answers_that_fit_are_accepted_of_many() -> None:
    """The same of 20,000."""
    print(f"seed {seed()}", variants(20_000, seed()))
