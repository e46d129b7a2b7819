"""Claude-style tool calls in the common vocabulary, which rules judge and people read.

Pure, and the only module that translates calls: an agent's own, those that a user edited, and those in a policy's test
cases. The agent's input may be hostile, so nothing here raises: a field of a wrong type counts as missing. If the
missing field is the one by which rules judge the action, no rule allows the call. The input itself is not changed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from posixpath import join
from typing import Any, Final

import msgspec

from hutch_shared import messages as m

__all__ = ["DIFF_LIMIT", "enters_plan", "mcp_readings", "named_by_server", "to_call", "to_questions"]

DIFF_LIMIT: Final = 64 * 1024
"""Characters of a diff. A longer diff is cut and ends with a note."""
_COMPARED_LINES: Final = 1000
"""The lines of one call up to which texts are compared. A hostile text with more lines could make that take seconds."""
_CUT: Final = "… (cut)"
_DESCRIPTION_LIMIT: Final = 1000
_QUESTIONS_LIMIT: Final = 20
_MCP: Final = "mcp__"
_LONGEST_NAME: Final = 1000
"""Characters of a tool's name that is read; a provider allows 128."""
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_-]")
_ABOVE_UTF16: Final = re.compile(r"[\U00010000-\U0010ffff]")
_WILD: Final = re.compile(r"[*?\[{!]")
_LEAVES: Final = re.compile(r"(?:^|[{,])[/~]|(?:^|[/{,])\.\.(?:$|[/},])")
"""Matches a glob pattern that can leave its directory: an absolute alternative, or a step up."""

_Fields = dict[str, Any]
_Pairs = list[tuple[str, str]]


def to_call(
    agent_tool: str,
    tool_input: dict[str, Any],
    call_id: str,
    cwd: str,
    *,
    servers: Iterable[str] | None = None,
    with_diff: bool = False,
) -> m.ToolCall:
    """Return the call with the fields that its action needs. Relative paths are joined to `cwd`, not resolved.

    `servers` are the names of the session's MCP servers, if they are known. `with_diff` adds an edit's diff for people
    to read; rules do not use it.
    """
    action: m.Action = "other"
    fields: _Fields = {}
    if agent_tool in _TOOLS:
        action, read = _TOOLS[agent_tool]
        fields = read(tool_input, cwd)
    elif agent_tool.startswith(_MCP):
        action = "mcp"
        server, tool = _server_and_tool(agent_tool, servers)
        fields = {"server": server, "tool": tool}
    if description := _text(tool_input, "description"):
        fields.setdefault("description", description[:_DESCRIPTION_LIMIT])
    if with_diff and (changes := _CHANGES.get(agent_tool)) is not None:
        fields["diff"] = _diff(fields["paths"], changes(tool_input))
    return m.ToolCall(call_id=call_id, action=action, agent_tool=agent_tool, input=tool_input, **fields)


def mcp_readings(agent_tool: str, servers: Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Return the MCP servers and tools that a name `mcp__server__tool` may mean, the longest server first.

    Both parts may contain `__`. With the names of the session's servers, only these count: there is no reading if the
    name is of none of them, and there are two equal ones if the CLI gives two of them one name. Without, every `__` may
    divide. A name that is too long has no reading.
    """
    name = agent_tool.removeprefix(_MCP)
    if name == agent_tool or len(name) > _LONGEST_NAME:
        return ()
    if servers is None:
        ends = [at for at in range(1, len(name) - 2) if name.startswith("__", at)]
        return tuple((name[:at], name[at + 2 :]) for at in reversed(ends))
    spellings = [spelling for server in servers for spelling in _spellings(server)]
    found = [one for one in spellings if name.startswith(f"{one}__") and len(name) > len(one) + 2]
    return tuple((one, name[len(one) + 2 :]) for one in sorted(found, key=len, reverse=True))


def named_by_server(call: m.ToolCall, servers: Iterable[str]) -> m.ToolCall:
    """Return a call of an MCP tool with the server and tool that its name has among the session's servers."""
    if not call.agent_tool.startswith(_MCP):
        return call
    server, tool = _server_and_tool(call.agent_tool, servers)
    return msgspec.structs.replace(call, server=server, tool=tool)


def _server_and_tool(agent_tool: str, servers: Iterable[str] | None) -> tuple[str | None, str | None]:
    if servers is not None and (readings := mcp_readings(agent_tool, servers)):
        return readings[0]
    server, _, tool = agent_tool.removeprefix(_MCP).partition("__")
    return server or None, tool or None


def _spellings(server: str) -> set[str]:
    """Return the names that the CLI may give a server in the names of its tools.

    The CLI counts in UTF-16, where a character above U+FFFF is two: both become `_`, which can look like a divider.
    """
    units = _ABOVE_UTF16.sub("__", server)
    return {_NOT_IN_NAMES.sub("_", one) for one in (server, units, units.replace(":", "__"))}


def to_questions(tool_input: dict[str, Any]) -> tuple[m.Question, ...]:
    """Return the questions of an `AskUserQuestion` input, without items that are not questions."""
    return tuple(
        m.Question(
            question=_text(item, "question") or "",
            header=_text(item, "header") or "",
            choices=tuple(
                m.Choice(label=label, description=_text(option, "description") or "")
                for option in _dicts(item, "options")
                if (label := _text(option, "label"))
            ),
            several=item.get("multiSelect") is True,
        )
        for item in _dicts(tool_input, "questions")[:_QUESTIONS_LIMIT]
        if _text(item, "question")
    )


# ---------------------------------------------------------------- one reader per shape of input


def _run(given: _Fields, cwd: str) -> _Fields:
    return {"command": _text(given, "command")}


def _shell_output(given: _Fields, cwd: str) -> _Fields:
    shell = _text(given, "bash_id") or _text(given, "shell_id") or _text(given, "task_id") or ""
    return {"description": f"background shell {shell}".rstrip()}


def _read(given: _Fields, cwd: str) -> _Fields:
    return {"paths": _paths(given, cwd, "file_path", "notebook_path")}


def _edit(given: _Fields, cwd: str) -> _Fields:
    return {"paths": _paths(given, cwd, "file_path")}


def _notebook(given: _Fields, cwd: str) -> _Fields:
    return {"paths": _paths(given, cwd, "notebook_path")}


def _look(given: _Fields, cwd: str) -> _Fields:
    return {"paths": _paths(given, cwd, "path") or (cwd,), "query": _text(given, "pattern")}


def _glob(given: _Fields, cwd: str) -> _Fields:
    """Add the directory where the fixed part of a pattern that leaves `path` ends: all matches lie below it."""
    fields = _look(given, cwd)
    pattern = (fields["query"] or "").replace("\\", "")
    if _LEAVES.search(pattern):
        fixed = _WILD.split(pattern, maxsplit=1)[0]
        if fixed != pattern:
            fixed = fixed[: fixed.rfind("/") + 1]
        unbound = not fixed or _LEAVES.search(pattern, len(fixed))
        outside = "/" if unbound else fixed.rstrip("/") or "/"
        fields["paths"] = (*fields["paths"], *_paths({"path": outside}, fields["paths"][0], "path"))
    return fields


def _fetch(given: _Fields, cwd: str) -> _Fields:
    return {"url": _text(given, "url"), "query": _text(given, "prompt")}


def _web_search(given: _Fields, cwd: str) -> _Fields:
    return {"query": _text(given, "query")}


def _task(given: _Fields, cwd: str) -> _Fields:
    return {"query": _text(given, "prompt")}


def _nothing(given: _Fields, cwd: str) -> _Fields:
    return {}


_TOOLS: Final[dict[str, tuple[m.Action, Callable[[_Fields, str], _Fields]]]] = {
    "Bash": ("run_command", _run),
    "BashOutput": ("other", _shell_output),
    "TaskOutput": ("other", _shell_output),
    "KillShell": ("other", _shell_output),
    "Read": ("read", _read),
    "NotebookRead": ("read", _read),
    "Edit": ("edit", _edit),
    "MultiEdit": ("edit", _edit),
    "Write": ("edit", _edit),
    "NotebookEdit": ("edit", _notebook),
    "Glob": ("search", _glob),
    "Grep": ("search", _look),
    "LS": ("search", _look),
    "WebFetch": ("fetch", _fetch),
    "WebSearch": ("search", _web_search),
    "Task": ("other", _task),
    "Agent": ("other", _task),
    "TodoWrite": ("other", _nothing),
    "AskUserQuestion": ("question", _nothing),
    "ExitPlanMode": ("plan", _nothing),
}


def enters_plan(call: m.ToolCall) -> bool:
    """Return whether the call only puts the agent into its mode `plan`."""
    return call.action == "other" and call.agent_tool == "EnterPlanMode"


# ---------------------------------------------------------------- diffs of edits


def _edits(given: _Fields) -> _Pairs:
    edits = _dicts(given, "edits") or [given]
    return [(_text(edit, "old_string") or "", _text(edit, "new_string") or "") for edit in edits]


_CHANGES: Final[dict[str, Callable[[_Fields], _Pairs]]] = {
    "Edit": _edits,
    "MultiEdit": _edits,
    "Write": lambda given: [("", _text(given, "content") or "")],
    "NotebookEdit": lambda given: [("", _text(given, "new_source") or "")],
}


# ---------------------------------------------------------------- fields


def _text(given: _Fields, name: str) -> str | None:
    value = given.get(name)
    return value if isinstance(value, str) else None


def _dicts(given: _Fields, name: str) -> list[_Fields]:
    value = given.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _paths(given: _Fields, cwd: str, *names: str) -> tuple[str, ...]:
    found = (_text(given, name) for name in names)
    return tuple(path if path.startswith("~") else join(cwd, path) for path in found if path)


def _diff(paths: tuple[str, ...], pairs: _Pairs) -> str:
    """Return one unified diff of the replaced texts. Line numbers count within each text."""
    path = paths[0] if paths else "?"
    lines = [f"--- {path}", f"+++ {path}"]
    room, compared = DIFF_LIMIT, 0
    for old, new in pairs:
        before, after = old.splitlines(), new.splitlines()
        compared += len(before) + len(after)
        for line in _changes(before, after) if compared <= _COMPARED_LINES else _beginnings(before, after):
            lines.append(line[:room])
            room -= len(line) + 1
            if room <= 0:
                return "\n".join([*lines, _CUT])
    return "\n".join(lines)


def _changes(before: list[str], after: list[str]) -> list[str]:
    return list(difflib.unified_diff(before, after, lineterm="", n=3))[2:]


def _beginnings(before: list[str], after: list[str]) -> list[str]:
    """Return the first lines of both texts, without comparing them."""
    head = f"@@ -1,{len(before)} +1,{len(after)} @@"
    return [head, *_beginning("-", before), *_beginning("+", after)]


def _beginning(sign: str, lines: list[str]) -> list[str]:
    shown: list[str] = []
    room = DIFF_LIMIT // 2
    for line in lines:
        if room <= 0:
            return [*shown, _CUT]
        shown.append(sign + line[:room])
        room -= len(line) + 2
    return shown
