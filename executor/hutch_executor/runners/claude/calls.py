"""Claude's tool calls as permission requests, and decisions in the CLI's form. Pure."""

from __future__ import annotations

from typing import Any, Final

from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.vocabulary import to_questions

__all__ = ["PLAN_TOOL", "QUESTION_TOOL", "judged_input", "kind_of", "plan_of"]

QUESTION_TOOL: Final = "AskUserQuestion"
PLAN_TOOL: Final = "ExitPlanMode"


def kind_of(agent_tool: str) -> m.PermissionKind:
    """Return the kind of request. The agent's questions and plans come as tool calls too."""
    if agent_tool == QUESTION_TOOL:
        return "question"
    return "plan" if agent_tool == PLAN_TOOL else "tool"


def plan_of(tool_input: dict[str, Any]) -> str:
    """Return the plan's text, which the CLI reads from the file that the model wrote."""
    plan = tool_input.get("plan")
    return plan if isinstance(plan, str) and plan.strip() else "(the agent gave no text for its plan)"


def judged_input(agent_tool: str, decision: m.PermissionDecision) -> dict[str, Any] | None:
    """Return the input that may run; None if the decision allows nothing.

    A decision whose digest does not match its input allows nothing.
    """
    if decision.decision == "deny" or decision.state not in ("allowed", "answered"):
        return None
    if input_digest(agent_tool, decision.input) != decision.digest:
        return None
    if agent_tool != QUESTION_TOOL:
        return decision.input
    answers = _answers(decision.input, decision.answers or {})
    return None if answers is None else {**decision.input, "answers": answers}


def _answers(tool_input: dict[str, Any], given: dict[str, Any]) -> dict[str, str] | None:
    """Return the answers by the text of their question, as hutchd gives them; several labels are joined with commas.

    None unless every question has an answer: the agent would take a missing one as given.
    """
    answers = {}
    for question in to_questions(tool_input):
        answer = given.get(question.question)
        parts: list[Any] = answer if isinstance(answer, list) else [answer]
        if not parts or not all(isinstance(part, str) and part for part in parts):
            return None
        answers[question.question] = ", ".join(parts)
    return answers or None
