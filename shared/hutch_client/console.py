"""Turns events into text for a terminal. Pure: no terminal, no clock; `show` writes the result.

A piece is either data (the agent's answer: standard output) or talk (tools, permission requests, notices, the end:
standard error). A live console shows text as it arrives; otherwise only whole blocks are shown. Text of an agent
reaches a piece only through `untrusted`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple

import msgspec

from hutch_client.tables import count, prompt_words, usage_words
from hutch_client.untrusted import one_line, plain, visible
from hutch_shared.events import (
    DATA_OF_KIND,
    Event,
    Notice,
    PermissionAsked,
    PermissionSettled,
    StderrText,
    Text,
    ToolCallSeen,
    ToolResult,
    TurnEnded,
    TurnKind,
    TurnStarted,
)
from hutch_shared.messages import Permission, Question, ToolCall
from hutch_shared.times import from_wire

__all__ = ["Console", "Piece", "question_lines"]

_RESULT_LINES: Final = 8
_CALL_LINES: Final = 60
_COLOURS: Final = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
_SCOPES: Final = {"session": ", in this session from now on:", "always": ", in this project from now on:"}
_VERBS: Final = {"run_command": "run", "read": "read", "edit": "edit", "fetch": "fetch", "search": "search"}
_CONTENTS: Final = frozenset(("content", "old_string", "new_string", "edits", "new_source"))
_SHOWN: Final = _CONTENTS | {
    *("command", "description", "timeout", "file_path", "notebook_path", "path", "url", "query", "pattern"),
    *("offset", "limit"),
}
_ENDS: Final = {
    "completed": ("green", "✓ done"),
    "failed": ("red", "✗ failed"),
    "stopped": ("yellow", "■ stopped"),
    "timed_out": ("red", "✗ timed out"),
}


class Piece(NamedTuple):
    """Text to write unchanged."""

    to: Literal["data", "talk"]
    text: str


class Console:
    """Takes the events of one session in order and returns the pieces to write for each.

    `at_line_start`: the next piece starts a line. `doing`: the agent's current work, in words, and `doing_since`: when
    the tool call that it names began (its event's time), or None.
    """

    def __init__(self, *, colour: bool = False, live: bool = False, prompts: bool = True, width: int = 100) -> None:
        """`live` shows text as it arrives, and thinking; `width` limits the lines of tools' output."""
        self.doing = "starting"
        self.doing_since: str | None = None
        self.at_line_start = True
        self._colour = colour
        self._live = live
        self._prompts = prompts
        self.width = width
        self._block: str | None = None  # the last block; an empty line separates it from a block of another kind
        self._written: dict[tuple[str, str | None], str] = {}  # text so far of unfinished blocks
        self._calls: dict[str, str] = {}
        self._running: dict[str, str] = {}  # the calls without a result, and when they began
        self._waiting: dict[str, str] = {}  # the calls of permission requests, by request
        self._last_call: str | None = None
        self._shown_whole: str | None = None  # the last call's id, if shown whole
        self._last_question: str | None = None
        self._spoke = False
        self._started_at: str | None = None
        self._kind: TurnKind = "prompt"

    def feed(self, event: Event) -> list[Piece]:
        """Return the pieces for `event`. If its data does not fit its kind, the pieces say so."""
        before = self.doing
        pieces = self._feed(event)
        if self.doing != before:
            names = ((self._calls.get(call), at) for call, at in self._running.items())
            self.doing_since = next((at for name, at in names if name == self.doing), None)
        return pieces

    def _feed(self, event: Event) -> list[Piece]:
        try:
            data = msgspec.json.decode(event.data, type=DATA_OF_KIND[event.kind])
            match data:
                case Text():
                    return self._text(event.kind, data)
                case TurnStarted():
                    return self._turn_started(data, event.at)
                case ToolCallSeen():
                    call = msgspec.convert(data.call, ToolCall)
                    self._running.setdefault(call.call_id, event.at)
                    return self._tool_call(call, data.parent) if data.edited_by is None else self._edited(call, data)
                case ToolResult():
                    return self._tool_result(data)
                case PermissionAsked():
                    return self.question(msgspec.convert(data.permission, Permission))
                case PermissionSettled():
                    if (call_id := self._waiting.pop(data.permission, "")) in self._running:
                        self._running[call_id] = event.at
                    return self._settled(data)
                case Notice():
                    return self._talk("notice", self._paint("yellow", f"! {plain(data.message)}"))
                case StderrText():
                    return self._talk(
                        "stderr", *(self._paint("dim", f"  │ {x}") for x in plain(data.text).splitlines())
                    )
                case TurnEnded():
                    return self._turn_ended(data, event.at)
        except msgspec.DecodeError:
            return self._talk("notice", self._paint("yellow", f"! event {event.seq} ({event.kind}) cannot be read"))
        return []  # usage of one model request

    # ------------------------------------------------------------ one method per kind

    def _turn_started(self, turn: TurnStarted, at: str) -> list[Piece]:
        self._calls.clear()
        self._running.clear()
        self._written.clear()
        self._last_call, self._shown_whole, self._spoke = None, None, False
        self._started_at, self._kind = at, turn.kind
        self.doing = "compacting" if turn.kind == "compact" else "thinking"
        if not self._prompts:
            return []
        first, *rest = plain(prompt_words(turn.prompt, turn.kind)).splitlines() or [""]
        return self._talk("prompt", *(self._paint("bold", line) for line in (f"❯ {first}", *(f"  {x}" for x in rest))))

    def _text(self, kind: str, text: Text) -> list[Piece]:
        thinking = kind.startswith("thinking")
        self.doing = "thinking" if thinking else "writing"
        if thinking and not self._live:
            return []
        whole = not kind.endswith("_delta")
        if text.parent is not None:  # a sub-agent's text is not the answer
            if thinking or not whole:
                return []
            lines = plain(text.text).splitlines()[:_RESULT_LINES]
            return self._talk("sub", *(self._paint("dim", f"  ┊ {line}") for line in lines))
        if not whole and not self._live:
            return []
        block = "thinking" if thinking else "text"
        key = (block, text.block)
        begun = self._written.get(key, "")
        if whole:
            self._written.pop(key, None)
            rest = text.text[len(begun) :] if text.text.startswith(begun) else ""
        else:
            self._written[key] = begun + text.text
            rest = text.text
        pieces = [] if begun and self._block == block else self._begin(block)
        words = plain(rest)
        if words:
            self.at_line_start = words.endswith("\n")
            pieces.append(Piece("talk", self._paint("dim", words)) if thinking else Piece("data", words))
            self._spoke = self._spoke or not thinking
        if whole and not self.at_line_start:
            pieces.append(Piece("talk" if thinking else "data", "\n"))
            self.at_line_start = True
        return pieces

    def _tool_call(self, call: ToolCall, parent: str | None) -> list[Piece]:
        if call.call_id in self._calls:  # its permission request came first and showed it
            return []
        self._remember(call)
        if call.action in ("question", "plan"):  # the request shows it
            return []
        head, *body = self._call_lines(call)
        if len(body) > _CALL_LINES:
            body[_CALL_LINES:] = [self._paint("dim", f"    … {count(len(body) - _CALL_LINES, 'more line')}")]
        else:
            self._shown_whole = call.call_id
        return self._talk("tool", *(f"{'  ' if parent else ''}{line}" for line in (head, *body)))

    def _edited(self, call: ToolCall, seen: ToolCallSeen) -> list[Piece]:
        """Show a call that a user edited: from now on it stands for the one that the agent made."""
        self._remember(call)
        head = self._paint("yellow", f"  ✎ edited by {one_line(seen.edited_by or '')}; this is what may run:")
        lines = self._call_lines(call)
        if call.action == "plan":
            lines += [f"    {line}" for line in plain(str(call.input.get("plan", ""))).splitlines()]
        return self._talk("tool", head, *lines)

    def _tool_result(self, result: ToolResult) -> list[Piece]:
        self._running.pop(result.call_id, None)
        self.doing = self._running_call() or "thinking"
        shown = [_cut(line, self.width) for line in plain(result.text).rstrip().splitlines()] or ["(no output)"]
        if len(shown) > _RESULT_LINES + 1:
            shown[_RESULT_LINES:] = [f"… {len(shown) - _RESULT_LINES} more lines"]
        if result.call_id != self._last_call and result.call_id in self._calls:
            shown.insert(0, f"{self._calls[result.call_id]}:")
        colour = "red" if result.is_error else "dim"
        marks = ("  ⎿ ", *["    "] * (len(shown) - 1))
        return self._talk("tool", *(self._paint(colour, mark + line) for mark, line in zip(marks, shown, strict=True)))

    def question(self, asked: Permission) -> list[Piece]:
        """Return the whole permission request; nothing if it is the request written last."""
        if self._last_question == asked.id:
            return []
        self._waiting[asked.id] = asked.call.call_id
        lines = []
        if asked.kind == "tool":
            if asked.call.call_id != self._shown_whole:
                lines = self._call_lines(asked.call)
            self._remember(asked.call)
            self._shown_whole = asked.call.call_id
        self.doing = "waiting for an answer"
        pieces = self._talk("tool", *lines, *(self._paint(colour, line) for colour, line in question_lines(asked)))
        self._last_question = asked.id
        return pieces

    def _settled(self, settled: PermissionSettled) -> list[Piece]:
        self.doing = self._running_call() or "working"
        good = settled.state in ("allowed", "answered")
        words = f"  {'✓' if good else '✗'} {settled.state}"
        if settled.state == "withdrawn":  # `by` holds the cause; the message would only repeat it
            words += f": {one_line(settled.by)}"
        else:
            words += "" if settled.state == "expired" else f" by {one_line(settled.by)}"
            words += _SCOPES.get(settled.scope or "", "")
            words += f" {one_line(settled.rule)}" if settled.rule else ""
            words += f": {one_line(settled.message)}" if settled.message else ""
        answers = [
            f"    {one_line(question, self.width)} → {one_line(_answer_words(answer), self.width)}"
            for question, answer in (settled.answers or {}).items()
        ]
        colour = "green" if good else "red"
        return self._talk("tool", self._paint(colour, words), *(self._paint("dim", line) for line in answers))

    def _turn_ended(self, ended: TurnEnded, at: str) -> list[Piece]:
        pieces = []
        if not self._spoke and ended.result:
            pieces = [*self._begin("text"), Piece("data", plain(ended.result).rstrip("\n") + "\n")]
        colour, words = _ENDS[ended.state]
        if self._started_at:
            words += f" in {(from_wire(at) - from_wire(self._started_at)) / 1000:.1f} s"
        if usage := usage_words(msgspec.to_builtins(ended.usage)):
            words += f" · {usage}"
        lines = [self._paint(colour, words)]
        if not ended.conversation_kept:
            lines[0] += self._paint("yellow", " · the conversation was not kept")
        if ended.message and (ended.state != "completed" or self._kind != "prompt" or not ended.conversation_kept):
            lines.append(self._paint(colour, f"  {plain(ended.message)}"))
        self.doing = "idle"
        return pieces + self._talk("end", *lines)

    # ------------------------------------------------------------ parts

    def _running_call(self) -> str | None:
        """Return the oldest call that has no result, in words."""
        return next((self._calls[call] for call in self._running if call in self._calls), None)

    def _remember(self, call: ToolCall) -> None:
        self._calls[call.call_id] = one_line(" ".join(_headline(call)), 60)
        self._last_call, self._shown_whole = call.call_id, None
        self.doing = self._calls[call.call_id]

    def _call_lines(self, call: ToolCall) -> list[str]:
        verb, what = _headline(call)
        first, *rest = visible(what).split("\n")
        note = f"  {self._paint('dim', '# ' + one_line(call.description, 80))}" if call.description else ""
        body = [f"    {line}" for line in rest]
        for line in visible(call.diff).splitlines() if call.diff else ():
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
            body.append("    " + (self._paint(colour, line) if colour else line))
        if unseen := _unseen(call):
            body += [f"    {line}" for line in visible(json.dumps(unseen, indent=2, ensure_ascii=False)).split("\n")]
        return [f"{self._paint('blue', '●')} {self._paint('bold', one_line(verb))} {first}{note}", *body]

    def _begin(self, block: str) -> list[Piece]:
        """End an open line, and add an empty line after a block of another kind."""
        pieces = []
        if not self.at_line_start:
            pieces.append(Piece("data" if self._block == "text" else "talk", "\n"))
        if self._block not in (None, block):
            pieces.append(Piece("talk", "\n"))
        self._block, self.at_line_start, self._last_question = block, True, None
        return pieces

    def _talk(self, block: str, *lines: str) -> list[Piece]:
        return [*self._begin(block), Piece("talk", "".join(f"{line}\n" for line in lines))]

    def _paint(self, colour: str, text: str) -> str:
        if not self._colour:
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def question_lines(asked: Permission) -> list[tuple[str, str]]:
    """Return (colour, line) for a request: the call, the reason, and the rule that `always` would add."""
    lines: list[tuple[str, str]] = []
    if asked.kind == "plan":
        lines += [
            ("bold", "? The agent's plan:"),
            *(("dim", f"    {line}") for line in plain(asked.plan or "").splitlines()),
        ]
    for question in asked.questions:
        lines += _choices(question)
    if asked.kind == "tool":
        lines.append(("yellow", f"? Allow? {asked.id}"))
    why = asked.why or (f"rule {asked.rule}" if asked.rule else "")
    if why:
        lines.append(("dim", f"    why: {one_line(why)}{f' ({one_line(asked.layer)})' if asked.layer else ''}"))
    for at, suggestion in enumerate(asked.suggestions):
        note = f" — {one_line(suggestion.note)}" if suggestion.note else ""
        lines.append(("dim", f"    {'always:' if at == 0 else '    or:'} {one_line(suggestion.rule)}{note}"))
    return lines


def _answer_words(answer: Any) -> str:
    return ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def _cut(line: str, width: int) -> str:
    line = line.expandtabs()
    return line if len(line) <= width else line[: width - 1] + "…"


def _choices(question: Question) -> list[tuple[str, str]]:
    lines = [("bold", f"? {one_line(question.question)}{' (several, by commas)' if question.several else ''}")]
    for number, choice in enumerate(question.choices, 1):
        note = f" — {one_line(choice.description)}" if choice.description else ""
        lines.append(("dim", f"    {number}  {one_line(choice.label)}{note}"))
    return lines


def _unseen(call: ToolCall) -> dict[str, Any]:
    """Return the parameters that neither headline nor diff shows: the user decides about them too."""
    if call.action not in _VERBS:
        return {}
    shown = _SHOWN if call.diff or call.action != "edit" else _SHOWN - _CONTENTS
    return {name: value for name, value in call.input.items() if name not in shown and value not in (None, False, "")}


def _headline(call: ToolCall) -> tuple[str, str]:
    """Return the verb and its object; in the common vocabulary where the call has an action there."""
    given = call.command or call.url or call.query or ", ".join(call.paths)
    match call.action:
        case "mcp":
            return f"{call.server}.{call.tool}", json.dumps(call.input, ensure_ascii=False)
        case "run_command" | "read" | "edit" | "fetch" | "search" if given:
            return _VERBS[call.action], given
        case _:
            return call.agent_tool, given or json.dumps(call.input, ensure_ascii=False)
