"""pending, approve, deny, answer: what waits for a person, and the person's word."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, output
from hutch_client.questions import chosen, headline
from hutch_client.tables import ago, count, print_json, print_lines, table
from hutch_client.untrusted import one_line
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS", "find_permission"]


def _pending_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", nargs="?", help="of one session alone")
    parser.add_argument("-a", "--all", action="store_true", help="settled ones too")
    parser.add_argument("-w", "--watch", action="store_true", help="go on and print each new question")
    output(parser, "text", "json", "jsonl")


def _pending(given: argparse.Namespace) -> int:
    if given.watch:
        if given.all or given.output == "json":
            raise HutchError(Reason.INVALID_PARAMS, "--watch goes with `-o text` and `-o jsonl`, and without --all.")
        from hutch_client.commands import following

        return following.watch_pending(given.session, jsonl=given.output == "jsonl")
    with BlockingConnection() as hutch:
        session = given.session and hutch.call("get_session", session=given.session)["id"]
        found = _list(hutch, session=session, everything=given.all)
    if given.output != "text":
        print_json(found) if given.output == "json" else print_lines(found)
        return exits.OK
    now = time.time()
    rows = (
        (one["id"], one["session"], one["state"], ago(one["asked_at"], now), one_line(headline(one), 100))
        for one in found
    )
    print(table(("QUESTION", "SESSION", "STATE", "AGE", "WHAT"), rows))
    return exits.OK


def _list(hutch: BlockingConnection, *, session: str | None = None, everything: bool = False) -> list[dict[str, Any]]:
    state = None if everything else "pending"
    found: list[dict[str, Any]] = []
    more, after = True, None
    while more:
        page = hutch.call("list_permissions", session=session, state=state, after=after)
        found += page["permissions"]
        more = page.get("more", False) and bool(page["permissions"])
        after = found[-1]["id"] if more else None
    return found


def find_permission(hutch: BlockingConnection, ref: str) -> dict[str, Any]:
    """Return the pending question that `ref` names: its id, the beginning of one, or a session that asks one thing.

    Raises HutchError NOT_FOUND or INVALID_PARAMS (several).
    """
    pending = _list(hutch)
    found = [one for one in pending if one["id"] == ref] or [one for one in pending if one["id"].startswith(ref)]
    if not found:
        settled = [one for one in _list(hutch, everything=True) if one["id"].startswith(ref)]
        if len(settled) == 1:
            return settled[0]  # hutchd says what stands
        session = _session(hutch, ref)
        found = [one for one in pending if one["session"] == session]
    if not found:
        raise HutchError(Reason.NOT_FOUND, f"Nothing waits for an answer under {ref}. `hutch pending` lists what does.")
    if len(found) > 1:
        ids = ", ".join(one["id"] for one in found)
        raise HutchError(Reason.INVALID_PARAMS, f"{ref} stands for several questions: {ids}. Name one.")
    return found[0]


def _session(hutch: BlockingConnection, ref: str) -> str | None:
    """Return the id of the session that `ref` names, if any."""
    try:
        return str(hutch.call("get_session", session=ref)["id"])
    except HutchError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise
        return None


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "permission", metavar="QUESTION", help="id, beginning of an id, or a session that asks one thing"
    )


def _approve_arguments(parser: argparse.ArgumentParser) -> None:
    _which(parser)
    scope = parser.add_mutually_exclusive_group()
    parser.set_defaults(scope="once")
    scope.add_argument(
        "--session", action="store_const", dest="scope", const="session", help="for this session from now on"
    )
    scope.add_argument("--always", action="store_const", dest="scope", const="always", help="always, in this project")
    parser.add_argument("--rule", help="with --session or --always: this rule in place of the one suggested")
    parser.add_argument("--edit", action="store_true", help="edit the input first, in $EDITOR")


def _approve(given: argparse.Namespace) -> int:
    if given.rule and given.scope == "once":
        raise HutchError(Reason.INVALID_PARAMS, "--rule goes with --session or --always.")
    with BlockingConnection() as hutch:
        asked = find_permission(hutch, given.permission)
        if asked["kind"] == "question":
            raise HutchError(Reason.INVALID_PARAMS, f"This is a question: `hutch answer {asked['id']} ANSWER`.")
        changed = None
        if given.edit:
            from hutch_client.editor import edit_input

            changed = edit_input(asked["call"]["input"])
        rule = given.rule if given.scope == "once" else given.rule or _suggested(asked)
        params = {"scope": given.scope, "rule": rule, "updated_input": changed}
        hutch.call("answer_permission", permission=asked["id"], decision="allow", **params)
    if rule is not None:
        where = "in this session" if given.scope == "session" else "in this project"
        print(f"Allowed {where} from now on: {one_line(rule)}", file=sys.stderr)
    return exits.OK


def _suggested(asked: dict[str, Any]) -> str:
    """Return the rule that was seen with the question. HutchError INVALID_PARAMS when there was none."""
    for suggestion in asked.get("suggestions", ()):
        return str(suggestion["rule"])
    raise HutchError(
        Reason.INVALID_PARAMS,
        f"No rule is narrow enough to suggest for {asked['id']}: {asked.get('why', '')} Approve it once, or give a rule"
        " with --rule.",
    )


def _deny_arguments(parser: argparse.ArgumentParser) -> None:
    _which(parser)
    parser.add_argument("-m", "--message", help="what the agent is told")
    parser.add_argument("--stop", action="store_true", help="stop the turn too")


def _deny(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        asked = find_permission(hutch, given.permission)
        params = {"message": given.message, "interrupt": given.stop}
        hutch.call("answer_permission", permission=asked["id"], decision="deny", **params)
    return exits.OK


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    _which(parser)
    parser.add_argument(
        "answers", metavar="ANSWER", nargs="+", help="one for each question: a number, a label or your own words"
    )


def _answer(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        asked = find_permission(hutch, given.permission)
        questions = asked.get("questions", ())
        if len(given.answers) != len(questions):
            raise HutchError(
                Reason.INVALID_PARAMS,
                f"{asked['id']} has {count(len(questions), 'question')}: give one answer for each.",
            )
        answers = {}
        for question, line in zip(questions, given.answers, strict=True):
            labels = [choice["label"] for choice in question.get("choices", ())]
            answer = chosen(labels, line, several=question.get("several", False))
            if answer is None:
                raise HutchError(Reason.INVALID_PARAMS, f"`{line}` is no answer: 1 to {len(labels)}, or words.")
            answers[question["question"]] = answer
        hutch.call("answer_permission", permission=asked["id"], decision="answer", answers=answers)
    return exits.OK


COMMANDS = {
    "pending": Command(_pending_arguments, _pending, "List what waits for an answer."),
    "approve": Command(_approve_arguments, _approve, "Let a tool call happen, or a plan go on."),
    "deny": Command(_deny_arguments, _deny, "Refuse it."),
    "answer": Command(_answer_arguments, _answer, "Answer an agent's question."),
}
