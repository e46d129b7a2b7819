"""pending, approve, deny, answer: permission requests, their decisions, and answers to agents' questions."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, output
from hutch_client.questions import answers_by_name, chosen, decided_by, headline, not_an_answer
from hutch_client.tables import ago, count, print_json, print_lines, table
from hutch_client.untrusted import one_line
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS", "find_permission"]


def _pending_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", nargs="?", help="only this session")
    parser.add_argument("-a", "--all", action="store_true", help="settled requests too")
    parser.add_argument("-w", "--watch", action="store_true", help="continue with each new request")
    output(parser, "text", "json", "jsonl")


def _pending(given: argparse.Namespace) -> int:
    if given.watch:
        if given.all or given.output == "json":
            raise HutchError(Reason.INVALID_PARAMS, "--watch needs `-o text` or `-o jsonl`, and excludes --all.")
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
        (
            *(one["id"], one["session"], one["state"], ago(one["asked_at"], now)),
            *([decided_by(one)] if given.all else []),
            one_line(headline(one), 100),
        )
        for one in found
    )
    print(table(("REQUEST", "SESSION", "STATE", "AGE", *(["DECIDED BY"] if given.all else []), "WHAT"), rows))
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
    """Return the pending request that `ref` names: by its id, a prefix of its id, or its session if that has only one.

    Raises HutchError NOT_FOUND, or INVALID_PARAMS if `ref` names several.
    """
    pending = _list(hutch)
    found = [one for one in pending if one["id"] == ref] or [one for one in pending if one["id"].startswith(ref)]
    if not found:
        settled = [one for one in _list(hutch, everything=True) if one["id"].startswith(ref)]
        if len(settled) == 1:
            return settled[0]  # a new decision gets an error that names the first one
        session = _session(hutch, ref)
        found = [one for one in pending if one["session"] == session]
    if not found:
        raise HutchError(Reason.NOT_FOUND, f"There is no pending permission request {ref}. `hutch pending` lists them.")
    if len(found) > 1:
        ids = ", ".join(one["id"] for one in found)
        raise HutchError(Reason.INVALID_PARAMS, f"{ref} names several permission requests: {ids}. Give one of these.")
    return found[0]


def _session(hutch: BlockingConnection, ref: str) -> str | None:
    """Return the id of the session that `ref` names, if there is one."""
    try:
        return str(hutch.call("get_session", session=ref)["id"])
    except HutchError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise
        return None


def _request_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "permission", metavar="REQUEST", help="id, prefix of an id, or a session with one pending request"
    )


def _approve_arguments(parser: argparse.ArgumentParser) -> None:
    _request_argument(parser)
    scope = parser.add_mutually_exclusive_group()
    parser.set_defaults(scope="once")
    scope.add_argument(
        "--session", action="store_const", dest="scope", const="session", help="from now on in this session"
    )
    scope.add_argument(
        "--always", action="store_const", dest="scope", const="always", help="from now on in this project"
    )
    parser.add_argument("--rule", help="with --session or --always: this rule instead of the suggested one")
    parser.add_argument("--edit", action="store_true", help="edit the input in $EDITOR first")


def _approve(given: argparse.Namespace) -> int:
    if given.rule and given.scope == "once":
        raise HutchError(Reason.INVALID_PARAMS, "--rule needs --session or --always.")
    if given.edit and given.scope != "once" and not given.rule:
        raise HutchError(
            Reason.INVALID_PARAMS,
            "The suggested rule is for the call before the edit:"
            f" with --edit and --{given.scope} give a rule with --rule.",
        )
    with BlockingConnection() as hutch:
        asked = find_permission(hutch, given.permission)
        if asked["kind"] == "question":
            raise HutchError(
                Reason.INVALID_PARAMS, f"The agent asks a question. Answer it: `hutch answer {asked['id']} ANSWER`."
            )
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
    """Return the first rule that the request suggests. HutchError INVALID_PARAMS if it suggests none."""
    for suggestion in asked.get("suggestions", ()):
        return str(suggestion["rule"])
    raise HutchError(
        Reason.INVALID_PARAMS,
        f"No rule is narrow enough to suggest for {asked['id']}: {asked.get('why', '')} Approve it once, or give a rule"
        " with --rule.",
    )


def _deny_arguments(parser: argparse.ArgumentParser) -> None:
    _request_argument(parser)
    parser.add_argument("-m", "--message", help="a message to the agent")
    parser.add_argument("--stop", action="store_true", help="stop the turn too")


def _deny(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        asked = find_permission(hutch, given.permission)
        params = {"message": given.message, "interrupt": given.stop}
        hutch.call("answer_permission", permission=asked["id"], decision="deny", **params)
    return exits.OK


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    _request_argument(parser)
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
        answers = []
        for question, line in zip(questions, given.answers, strict=True):
            labels = [choice["label"] for choice in question.get("choices", ())]
            answer = chosen(labels, line, several=question.get("several", False))
            if answer is None:
                raise HutchError(Reason.INVALID_PARAMS, not_an_answer(labels, line))
            answers.append(answer)
        named = answers_by_name([one["question"] for one in questions], answers)
        hutch.call("answer_permission", permission=asked["id"], decision="answer", answers=named)
    return exits.OK


COMMANDS = {
    "pending": Command(_pending_arguments, _pending, "List pending permission requests."),
    "approve": Command(_approve_arguments, _approve, "Allow a tool call or a plan."),
    "deny": Command(_deny_arguments, _deny, "Deny it."),
    "answer": Command(_answer_arguments, _answer, "Answer an agent's question."),
}
