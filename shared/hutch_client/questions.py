"""Permission requests in words, and typed replies as parameters of `answer_permission`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from hutch_client.untrusted import one_line

__all__ = [
    "WORDS",
    "answers_by_name",
    "chosen",
    "decided_by",
    "editable",
    "edited",
    "headline",
    "not_an_answer",
    "read_reply",
]

WORDS = "[y]es  [n]o or n MESSAGE  [s]ession  [a]lways  [e]dit  [x] no, and stop"
_DIGITS: Final = 10
"""Digits that a choice's number has at most."""
_DECISIONS: dict[str, dict[str, Any]] = {
    "y": {"decision": "allow"},
    "yes": {"decision": "allow"},
    "s": {"decision": "allow", "scope": "session"},
    "session": {"decision": "allow", "scope": "session"},
    "a": {"decision": "allow", "scope": "always"},
    "always": {"decision": "allow", "scope": "always"},
    "n": {"decision": "deny"},
    "no": {"decision": "deny"},
    "x": {"decision": "deny", "interrupt": True},
    "stop": {"decision": "deny", "interrupt": True},
}


def headline(permission: dict[str, Any]) -> str:
    """Return the request in one line: the questions, the plan or the tool call, as it was edited."""
    call = permission["call"]
    if (edited := permission.get("updated_input")) is not None:
        what = edited.get("command") or edited.get("url") or edited.get("query") or edited.get("file_path") or edited
        return f"{call['agent_tool']} {what} (edited)"
    match permission["kind"]:
        case "question":
            return " / ".join(one["question"] for one in permission.get("questions", ()))
        case "plan":
            return str(permission.get("plan", ""))
        case _:
            what = call.get("command") or call.get("url") or call.get("query") or ", ".join(call.get("paths", ()))
            return f"{call['agent_tool']} {what or call['input']}"


def decided_by(permission: dict[str, Any]) -> str:
    """Return who or what settled a request, for what scope and by or with which rule; empty while it is pending."""
    scope = permission.get("scope", "once")
    words = [permission.get("settled_by", ""), "" if scope == "once" else scope, permission.get("settled_rule", "")]
    return " ".join(one_line(word, 60) for word in words if word)


def read_reply(line: str) -> dict[str, Any] | Literal["edit"] | None:
    """Return the decision in a typed line (without the request's id), `edit`, or None if the line is not understood.

    After a denial the rest of the line is a message to the agent. An empty line decides nothing.
    """
    word, _, message = line.strip().partition(" ")
    word, message = word.lower(), message.strip()
    if word in ("e", "edit") and not message:
        return "edit"
    decision = _DECISIONS.get(word)
    if decision is None or (message and decision["decision"] != "deny"):
        return None
    return {**decision, "message": message} if message else dict(decision)


def chosen(labels: Sequence[str], line: str, *, several: bool = False) -> str | list[str] | None:
    """Return the answer to a question: a label by number or name, several separated by commas, or free text.

    None if the line is empty or a number names no choice.
    """
    by_name = {label.lower(): label for label in reversed(labels)}
    whole = line.strip()
    parts = [part.strip() for part in line.split(",")] if several and whole.lower() not in by_name else [whole]
    answers = []
    for part in parts:
        number = int(part) if part.isdecimal() and len(part) <= _DIGITS else 0
        if 1 <= number <= len(labels):
            answers.append(labels[number - 1])
        elif part.lower() in by_name:
            answers.append(by_name[part.lower()])
        elif part.isdecimal() and labels:
            return None
        elif part:
            answers.append(part)
    if not answers:
        return None
    return answers if several else answers[0]


def not_an_answer(labels: Sequence[str], line: str) -> str:
    """Return the sentence about a line that `chosen` does not take."""
    numbers = f"a number from 1 to {len(labels)}, or " if labels else ""
    return f"`{one_line(line, 60)}` is not an answer: give {numbers}your own words."


def answers_by_name(questions: Sequence[str], answers: Sequence[str | list[str]]) -> dict[str, str | list[str]]:
    """Return the `answers` of `answer_permission` for questions with these texts, in their order.

    A question is named by its text; if that names another one too, or reads like a position, by its position.
    """
    positions = [str(at + 1) for at in range(len(questions))]
    return {
        position if question in positions or questions.count(question) > 1 else question: answer
        for position, question, answer in zip(positions, questions, answers, strict=True)
    }


def editable(tool_input: dict[str, Any]) -> tuple[str, str]:
    """Return the text to edit and the suffix of its file: a command as it is, any other input as JSON."""
    if isinstance(command := tool_input.get("command"), str):
        return command + "\n", ".sh"
    import json

    return json.dumps(tool_input, indent=2, ensure_ascii=False) + "\n", ".json"


def edited(tool_input: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the edited input. ValueError, with a sentence, if the text is not a valid input."""
    if not text.strip():
        raise ValueError("The text is empty.")
    if isinstance(tool_input.get("command"), str):
        return {**tool_input, "command": text.removesuffix("\n")}
    import json

    changed = json.loads(text, object_pairs_hook=_without_twins)
    if not isinstance(changed, dict):
        raise ValueError("The input must stay a JSON object.")
    try:
        json.dumps(changed, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("It has half of a character (a lone surrogate).") from None
    except ValueError:
        raise ValueError("It has a number that JSON does not have (NaN, or too large).") from None
    return changed


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("An object has a key twice.")
    return found
