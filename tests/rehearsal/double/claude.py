"""A double of the Claude CLI: it has the part of the stream-json protocol that Hutch uses, and calls a real server.

It uses the standard library only. It does only what the real CLI does in a dialogue of `tests/system/test_double.py`.
For anything else it ends with a sentence on standard error, since a guess could hide a fault.

The main thread reads standard input. One thread plays the turns; a call's tool runs in a thread of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

VERSION = "2.1.332-double"
MODEL = "claude-opus-5-5"
"""The model that the real CLI uses by default."""
PRICES = {"input": 4e-6, "output": 20e-6, "cache_read": 0.2e-6, "cache_write": 5e-6}
"""US dollars per token of `MODEL`. For a model that the CLI does not know, it uses half of this."""
REJECTED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, the"
    " new_string was NOT written to the file). STOP what you are doing and wait for the user to tell you how to"
    " proceed."
)
CUT_SHORT = (
    f"{REJECTED} Correction to the text above: this call was stopped while running, not refused before it ran. It may"
    " have run in part or in full, and its changes may have been written. No permission prompt was involved. Work it"
    " started elsewhere (a remote command, a background process) may still be running, so check before starting the"
    " same work again. The instruction to stop and wait still stands."
)
LOST = (
    "[Tool call interrupted: the session ended before this call's result was recorded, so its outcome is unknown. Check"
    " whether it took effect before relying on it or running it again.]"
)
SUMMARISE = "Your task is to create a detailed summary of the conversation so far."
SUMMARY = "This session is being continued from a previous conversation that ran out of context.\n\nSummary:"
ENTERED_PLAN_MODE = (
    "Entered plan mode. You should now focus on exploring the codebase and designing an implementation "
    "approach.\n\nIn plan mode, you should:\n1. Thoroughly explore the codebase to understand existing "
    "patterns\n2. Identify similar features and architectural approaches\n3. Consider multiple approaches "
    "and their trade-offs\n4. Use AskUserQuestion if you need to clarify the approach\n5. Design a "
    "concrete implementation strategy\n6. When ready, use ExitPlanMode to present your plan for "
    "approval\n\nRemember: DO NOT write or edit any files yet. This is a read-only exploration and "
    "planning phase."
)
IN_CONTEXT = "(file state is current in your context — no need to Read it back)"
READ_ONLY = frozenset({"cat", "echo", "env", "false", "head", "ls", "pwd", "tail", "true", "wc"})
"""Commands that run in parallel with others, unless the line has more than plain words."""
REFUSALS = {
    400: "API Error: 400 {message}",
    401: "Failed to authenticate. API Error: 401 {message}",
    403: "Failed to authenticate. API Error: 403 {message}",
    429: "API Error: Request rejected (429) · {message}",
}
SERVER_FAILED = (
    "API Error: {status} {message}. This is a server-side issue, usually temporary — try again in a moment. If it"
    " persists, check your inference gateway ({host})."
)
RETRIED = {401: "authentication_failed", 429: "rate_limit", 529: "overloaded"}
"""The CLI's names for refusals that it retries; for other statuses from 500 on the name is `server_error`."""
SILENT_REPEATS = {400: 2}
"""Requests that the CLI repeats at once, without an event."""
STATUSES = {"overloaded_error": 529, "rate_limit_error": 429, "authentication_error": 401, "invalid_request_error": 400}
FLAGS = frozenset({"verbose", "include-partial-messages", "strict-mcp-config", "disable-slash-commands"})
VALUES = frozenset(
    {"output-format", "input-format", "permission-prompt-tool", "setting-sources", "settings", "permission-mode"}
    | {"disallowedTools", "allowedTools", "session-id", "resume", "model", "max-turns", "mcp-config"}
    | {"system-prompt-file", "append-system-prompt-file"}
)

Message = dict[str, Any]


def refuse(why: str) -> NoReturn:
    """End the program: the double does not know what the real CLI would do."""
    sys.stderr.write(f"The double of the Claude CLI does not know {why}.\n")
    sys.stderr.flush()
    os._exit(70)


def new_id() -> str:
    """Return a random UUID."""
    text = os.urandom(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def options_of(argv: list[str]) -> dict[str, str]:
    """Return the flags of a command line, without their dashes; those without a value have an empty one."""
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if name in FLAGS or name == "fork-session":
            found[name] = ""
        elif name in VALUES:
            found[name] = value if equals else next(words, "")
        else:
            refuse(f"the argument {word!r}")
    return found


def secret_of(variable: str) -> str | None:
    """Remove an environment variable that has the number of a pipe; return the pipe's content."""
    number = os.environ.pop(variable, None)
    if number is None:
        return None
    with open(int(number), "rb") as pipe:
        return pipe.read().decode()


# ---------------------------------------------------------------- lines to Hutch


class Lines:
    """Standard output, and the control requests that wait for a response."""

    def __init__(self) -> None:
        self.session = ""
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[threading.Event, list[Any]]] = {}

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        line = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
        with self._lock:
            sys.stdout.buffer.write(line.encode(errors="replace") + b"\n")
            sys.stdout.buffer.flush()

    def say(self, kind: str, **fields: Any) -> None:
        """Write a line of the conversation."""
        self.write(kind, **fields, session_id=self.session, uuid=new_id())

    def system(self, subtype: str, **fields: Any) -> None:
        """Write a `system` line."""
        self.say("system", subtype=subtype, **fields)

    def request(self, aborted: threading.Event, **request: Any) -> dict[str, Any] | None:
        """Send a control request and return its response; None if the turn was interrupted first."""
        name = new_id()
        waiting = self._waiting[name] = (threading.Event(), [])
        self.write("control_request", request_id=name, request=request)
        if not aborted.is_set():
            waiting[0].wait()
        del self._waiting[name]
        if not waiting[1]:
            self.write("control_cancel_request", request_id=name)
            return None
        answer: dict[str, Any] = waiting[1][0]
        if answer.get("subtype") != "success":
            refuse(f"the response {answer!r}")
        return answer.get("response") or {}

    def answered(self, response: dict[str, Any]) -> None:
        """Pass a control response to the request that waits for it."""
        if waiting := self._waiting.get(response["request_id"]):
            waiting[1].append(response)
            waiting[0].set()

    def give_up(self) -> None:
        """End the wait of all requests: the turn was interrupted."""
        for waiting, _ in [*self._waiting.values()]:
            waiting.set()

    def respond(self, name: str, response: dict[str, Any] | None, error: str = "") -> None:
        """Respond to a control request."""
        subtype = {"subtype": "success", "response": response} if response is not None else {"subtype": "error"}
        more = {"error": error} if error else {}
        self.write("control_response", response={"request_id": name, **subtype, **more})


# ---------------------------------------------------------------- the model


class RefusedError(Exception):
    """The provider refused the request, or ended its answer with an error."""

    def __init__(self, status: int, message: str, retry_after: float, *, begun: bool) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after, self.begun = status, message, retry_after, begun


class LostError(Exception):
    """The connection to the model broke off."""


class AbortedError(Exception):
    """The turn was interrupted."""


class Provider:
    """A client of the Messages API, with the URL and credential from the environment."""

    def __init__(self) -> None:
        self._unix = os.environ.get("ANTHROPIC_UNIX_SOCKET")
        self.scheme, _, rest = os.environ.get("ANTHROPIC_BASE_URL", "https://api.anthropic.com").partition("://")
        self.host, _, path = rest.partition("/")
        self._path = f"/{path}".rstrip("/")
        key, token = (secret_of(f"CLAUDE_CODE_{kind}_FILE_DESCRIPTOR") for kind in ("API_KEY", "OAUTH_TOKEN"))
        self._credential = f"authorization: Bearer {token}" if token is not None else f"x-api-key: {key or ''}"
        self._socket: socket.socket | None = None
        self.aborted = threading.Event()

    def abort(self) -> None:
        """End the current answer."""
        self.aborted.set()
        if (current := self._socket) is not None:
            with suppress(OSError):  # the connection has ended already
                current.shutdown(socket.SHUT_RDWR)

    def events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of the model's answer.

        RefusedError, LostError or AbortedError if the answer is not complete.
        """
        begun = ended = False
        try:
            with self._connected() as self._socket:
                data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
                self._socket.sendall(self._head(len(data)) + data)
                for event in _events(_body(self._socket)):
                    if event["type"] == "error":
                        status = STATUSES.get(event["error"]["type"], 500)
                        raise RefusedError(status, event["error"]["message"], 0, begun=True)
                    begun, ended = True, ended or event["type"] == "message_stop"
                    yield event
        except OSError as error:
            raise (AbortedError if self.aborted.is_set() else LostError)(begun) from error
        finally:
            self._socket = None
        if self.aborted.is_set():
            raise AbortedError
        if not ended:
            raise LostError(begun)

    def _connected(self) -> socket.socket:
        if self._unix is not None:
            made = socket.socket(socket.AF_UNIX)
            made.connect(self._unix)
            return made
        name, _, port = self.host.partition(":")
        made = socket.create_connection((name, int(port or (443 if self.scheme == "https" else 80))))
        if self.scheme != "https":
            return made
        import ssl

        return ssl.create_default_context().wrap_socket(made, server_hostname=name)

    def _head(self, length: int) -> bytes:
        lines = (
            f"POST {self._path}/v1/messages?beta=true HTTP/1.1",
            f"host: {self.host}",
            f"user-agent: claude-cli/{VERSION}",
            "accept: application/json",
            "content-type: application/json",
            f"content-length: {length}",
            "anthropic-version: 2023-06-01",
            self._credential,
            "connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def _body(connection: socket.socket) -> Iterator[bytes]:
    """Yield the body of a response with status 200 as it arrives. RefusedError for another status."""
    buffer = b""

    def more() -> bytes:
        if not (data := connection.recv(65536)):
            raise ConnectionResetError
        return data

    while b"\r\n\r\n" not in buffer:
        buffer += more()
    head, _, buffer = buffer.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    status = int(first.split()[1])
    chunked = "chunked" in fields.get("transfer-encoding", "")
    whole = b""
    if not chunked:
        while len(buffer) < int(fields["content-length"]):
            buffer += more()
        whole = buffer
    if status != 200:
        try:
            message = json.loads(whole)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = whole.decode(errors="replace")
        raise RefusedError(status, message, float(fields.get("retry-after", 0)), begun=False)
    if not chunked:
        yield whole
        return
    while True:
        while b"\r\n" not in buffer:
            buffer += more()
        size, _, buffer = buffer.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        while len(buffer) < length + 2:
            buffer += more()
        if not length:
            return
        yield buffer[:length]
        buffer = buffer[length + 2 :]


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events that have data, except pings."""
    buffer = b""
    for chunk in chunks:
        *whole, buffer = (buffer + chunk).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and (found := json.loads(line[5:]))["type"] != "ping":
                    yield found


# ---------------------------------------------------------------- the conversation


class Conversation:
    """The messages and the usage so far; each is stored in a transcript at once."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Begin a conversation, or continue the one to resume."""
        self.cwd = os.getcwd()
        self.config = os.environ.get("CLAUDE_CONFIG_DIR") or os.path.join(os.environ["HOME"], ".claude")
        earlier = options.get("resume")
        self.id = (options.get("session-id") if earlier is None or "fork-session" in options else earlier) or new_id()
        self.messages: list[Message] = []
        self.sums: dict[str, dict[str, Any]] = {}
        self.prompts: set[str] = set()
        """The uuids of the prompts."""
        self._unwritten: list[bytes] = []
        """The lines of another transcript that this one begins with."""
        if earlier is not None:
            self._load(earlier)
            self._mend()

    @property
    def path(self) -> str:
        """The path of the transcript."""
        return self._path(self.id)

    @property
    def plan(self) -> str:
        """The path of the file for the plan."""
        return os.path.join(self.config, "plans", f"rehearsed-{self.id[:8]}.md")

    def _path(self, name: str) -> str:
        folder = "".join(one if one.isascii() and one.isalnum() else "-" for one in self.cwd)
        if len(folder) > 200:
            refuse("how a long folder is called")
        return os.path.join(self.config, "projects", folder, f"{name}.jsonl")

    def _load(self, name: str) -> None:
        try:
            with open(self._path(name), "rb") as file:
                lines = file.readlines()
        except FileNotFoundError:
            refuse("how an unknown conversation is resumed")
        if name != self.id:
            self._unwritten = lines
        for entry in map(json.loads, lines):
            if entry["type"] == "usage":
                self.sums = entry["sums"]
            elif entry["type"] == "compacted":
                self.messages = entry["messages"]
            else:
                self.messages.append(entry["message"])
                self.prompts.add(entry.get("uuid", ""))

    def _mend(self) -> None:
        """Complete a transcript whose CLI was killed during a turn."""
        calls = [block["id"] for block in _blocks(self.messages[-1]) if block["type"] == "tool_use"]
        if calls:
            lost = {"type": "tool_result", "content": LOST, "is_error": True}
            self.add("user", [{**lost, "tool_use_id": call} for call in calls])
        if self.messages[-1]["role"] == "user":  # the real CLI does not store the messages after this one
            self.messages.append({"role": "assistant", "content": [{"type": "text", "text": "No response requested."}]})

    def add(self, role: str, content: Any, uuid: str = "") -> None:
        """Append a message; `uuid` if it is a prompt."""
        self.messages.append({"role": role, "content": content})
        self.prompts |= {uuid} if uuid else set()
        self._store({"type": role, "message": self.messages[-1], "sessionId": self.id, "uuid": uuid or new_id()})

    def compact(self, messages: list[Message], uuid: str) -> None:
        """Replace all messages; `uuid` is the command's."""
        self.messages = messages
        self.prompts.add(uuid)
        self._store({"type": "compacted", "messages": messages, "sessionId": self.id, "uuid": uuid})

    def count(self, model: str, usage: Mapping[str, Any]) -> None:
        """Add the usage of one request to the sums."""
        keys = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts = dict(zip(PRICES, (usage.get(key) or 0 for key in keys), strict=True))
        names = ("inputTokens", "outputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")
        basis = "list" if model.startswith(("claude-opus-", "claude-sonnet-", "claude-haiku-")) else "unknown"
        sums = self.sums.setdefault(model, {**dict.fromkeys(names, 0), "costUSD": 0.0, "costBasis": basis})
        for name, count in zip(names, counts.values(), strict=True):
            sums[name] += count
        share = 1.0 if model == MODEL else 0.5
        sums["costUSD"] += share * sum(PRICES[kind] * count for kind, count in counts.items())
        self._store({"type": "usage", "sums": self.sums})

    def _store(self, entry: Mapping[str, Any]) -> None:
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            lines, self._unwritten = self._unwritten, []
            file.write(b"".join(lines) + json.dumps(entry).encode() + b"\n")

    def sent(self) -> list[Message]:
        """Return the messages as the model gets them: consecutive messages of one side are joined."""
        merged: list[Message] = []
        for message in self.messages:
            if merged and merged[-1]["role"] == message["role"] == "user":
                merged[-1] = {"role": "user", "content": _joined(_blocks(merged[-1]), _blocks(message))}
            else:
                merged.append(message)
        return merged


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _joined(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if first[-1]["type"] == second[0]["type"] == "text":
        first = [*first[:-1], {**first[-1], "text": f"{first[-1]['text']}\n"}]
    return [*first, *second]


# ---------------------------------------------------------------- the tools


class ToolError(Exception):
    """A tool failed; the text is its result."""


class InvalidCallError(Exception):
    """The call cannot run, so no permission is requested; the text is the reason."""


Ran = tuple[str, Any]
"""The text of a result, and the CLI's own record of the result."""


class Tools:
    """The tools that the double can run in its working directory. `kill` ends the running commands."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._running: set[subprocess.Popen[bytes]] = set()

    def path(self, call: Mapping[str, Any]) -> str:
        """Return the absolute path of a call."""
        return os.path.join(self._conversation.cwd, call["file_path"])

    def is_parallel(self, tool: str, call: Mapping[str, Any]) -> bool:
        """Whether the call may run in parallel with others."""
        command = str(call.get("command"))
        plain = not set(command) & set("<>|&;$`()\n") and command.split()[:1] and command.split()[0] in READ_ONLY
        return tool == "Read" or (tool == "Bash" and bool(plain))

    def check(self, tool: str, call: Mapping[str, Any]) -> None:
        """Raise InvalidCallError if the call cannot run."""
        if tool not in INPUTS:
            raise InvalidCallError(f"Error: No such tool available: {tool}")
        if tool == "Bash" and "command" not in call:
            problems = ["The required parameter `command` is missing"]
            problems += [f"An unexpected parameter `{name}` was provided" for name in call.keys() - INPUTS[tool]]
            raise InvalidCallError(
                f"InputValidationError: Bash failed due to the following issues:\n{_lines(problems)}"
            )
        if not call.keys() <= INPUTS[tool]:
            refuse(f"the input {sorted(call)} of {tool}")
        if tool == "Edit":
            if not os.path.isabs(call["file_path"]):
                refuse("the result of an edit of a relative path")
            try:
                text = _read(self.path(call))
            except FileNotFoundError:
                raise InvalidCallError(self._missing()) from None
            if call["old_string"] not in text:
                raise InvalidCallError(f"String to replace not found in file.\nString: {call['old_string']}")
            if text.count(call["old_string"]) > 1 and not call.get("replace_all"):
                refuse("how an ambiguous edit fails")

    def run(self, tool: str, call: Mapping[str, Any], aborted: threading.Event) -> Ran:
        """Run an allowed call. ToolError if it fails."""
        return getattr(self, f"_{tool.lower()}")(call, aborted)  # type: ignore[no-any-return]

    def kill(self) -> None:
        """Kill the running commands and all their processes."""
        for process in [*self._running]:
            for pid in [*_descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _missing(self) -> str:
        return f"File does not exist. Note: your current working directory is {self._conversation.cwd}."

    def _bash(self, call: Mapping[str, Any], aborted: threading.Event) -> Ran:
        process = subprocess.Popen(
            ["bash", "-c", call["command"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "CLAUDECODE": "1"},
        )
        self._running.add(process)
        seconds = call.get("timeout", 120_000) / 1000
        late = threading.Timer(seconds, process.terminate)
        late.start()
        try:
            if aborted.is_set():
                self.kill()
            output = self._output(process)
        finally:
            late.cancel()
            self._running.discard(process)
        text = output.decode(errors="replace").rstrip("\n")
        if len(text) > 30_000:
            refuse("where long output is put")
        if code := process.returncode:
            if code == -signal.SIGTERM:
                text = f"Command timed out after {int(seconds)}s\n{text}"
            raise ToolError(f"Exit code {code if code > 0 else 128 - code}\n{text}".rstrip("\n"))
        record = {"stdout": text, "stderr": "", "interrupted": False, "isImage": False, "noOutputExpected": False}
        return text or "(Bash completed with no output)", record

    def _output(self, process: subprocess.Popen[bytes]) -> bytes:
        """Return the output of a command up to its end. A process that it left may still write."""
        assert process.stdout is not None
        parts: list[bytes] = []
        reader = threading.Thread(target=lambda: parts.extend(iter(lambda: os.read(out, 65536), b"")), daemon=True)
        out = process.stdout.fileno()
        reader.start()
        process.wait()
        reader.join(0.2)
        return b"".join(parts)

    def _read(self, call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        path = self.path(call)
        try:
            lines = _read(path).split("\n")
        except FileNotFoundError:
            raise ToolError(self._missing()) from None
        except IsADirectoryError:
            raise ToolError(f"EISDIR: illegal operation on a directory, read '{path}'") from None
        first = call.get("offset", 1)
        shown = lines[first - 1 :][: call.get("limit", 2000)]
        if not shown:
            refuse("how to read behind the end of a file")
        text = "\n".join(f"{first + number}\t{line}" for number, line in enumerate(shown))
        content = {"filePath": path, "content": "\n".join(shown), "numLines": len(shown), "startLine": first}
        return text, {"type": "text", "file": {**content, "totalLines": len(lines)}}

    def _write(self, call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        path = self.path(call)
        before = _read(path) if os.path.exists(path) else None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(call["content"])
        record = {"filePath": path, "content": call["content"], "structuredPatch": [], "originalFile": before}
        if before is None:
            return f"File created successfully at: {path} {IN_CONTEXT}", {"type": "create", **record}
        return f"The file {path} has been updated successfully. {IN_CONTEXT}", {"type": "update", **record}

    def _edit(self, call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        path = self.path(call)
        before = _read(path)
        count = -1 if call.get("replace_all") else 1
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(before.replace(call["old_string"], call["new_string"], count))
        record = {"filePath": path, "oldString": call["old_string"], "newString": call["new_string"]}
        text = f"The file {path} has been updated successfully. {IN_CONTEXT}"
        return text, {**record, "originalFile": before, "structuredPatch": [], "userModified": False}

    def _askuserquestion(self, call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        answers = ", ".join(f'"{question}"="{answer}"' for question, answer in call["answers"].items())
        text = f"Your questions have been answered: {answers}. You can now continue with these answers in mind."
        return text, {"questions": call["questions"], "answers": call["answers"]}

    def _enterplanmode(self, _call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        return ENTERED_PLAN_MODE, {"message": ENTERED_PLAN_MODE}

    def _exitplanmode(self, call: Mapping[str, Any], _aborted: threading.Event) -> Ran:
        path = call["planFilePath"]
        text = (
            "User has approved your plan. You can now start coding. Start with updating your todo list if applicable"
            f"\n\nYour plan has been saved to: {path}\nYou can refer back to it if needed during implementation."
            f"\n\n## Approved Plan:\n{call['plan']}"
        )
        return text, {"plan": call["plan"], "isAgent": False, "filePath": path}


INPUTS = {
    "Bash": {"command", "description", "timeout"},
    "Read": {"file_path", "limit", "offset"},
    "Write": {"file_path", "content"},
    "Edit": {"file_path", "old_string", "new_string", "replace_all"},
    "AskUserQuestion": {"questions", "answers"},
    "EnterPlanMode": set(),
    "ExitPlanMode": {"plan", "planFilePath"},
}
"""The tools, and the fields that their inputs may have."""
INTERACTIVE = ("AskUserQuestion", "ExitPlanMode")
"""The tools for which the CLI itself asks the user."""


def _lines(parts: list[str]) -> str:
    return "\n".join(parts)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def _descendants(pid: int) -> list[int]:
    """Return the living descendants of a process."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            pass  # the process has ended
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


# ---------------------------------------------------------------- calls and turns


class Calls:
    """The tool calls of one answer of the model.

    Each requests permission, runs and is reported; some run in parallel.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._waiting: list[dict[str, Any]] = []
        self._running: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.results: list[dict[str, Any]] = []
        self.stopped = False
        """Whether a denial ended the turn."""

    def add(self, call: dict[str, Any]) -> None:
        """Add a call. It begins at once unless it must wait for an earlier one."""
        try:
            self._turn.tools.check(call["name"], call["input"])
            call["invalid"] = None
        except InvalidCallError as error:
            call["invalid"] = str(error)
        with self._changed:
            if call["name"] not in INPUTS:
                self._report(call, f"<tool_use_error>{call['invalid']}</tool_use_error>", True, call["invalid"])
                return
            self._waiting.append(call)
            self._begin()

    def finish(self) -> list[dict[str, Any]]:
        """Wait for all calls; return their results in the order of their ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running)
        return self.results

    def _begin(self) -> None:
        """Begin the next calls. The caller holds the lock."""
        parallel = self._turn.tools.is_parallel
        while self._waiting:
            if self.stopped or self._turn.aborted.is_set():
                while self._waiting:
                    self._report(self._waiting.pop(0), REJECTED, True, "User rejected tool use")
                break
            head = self._waiting[0]
            beside = all(parallel(one["name"], one["input"]) for one in (head, *self._running))
            if self._running and not beside:
                break
            self._running.append(self._waiting.pop(0))
            threading.Thread(target=self._play, args=(head,), daemon=True).start()

    def _play(self, call: dict[str, Any]) -> None:
        try:
            text, is_error, record = self._run(call)
            with self._changed:
                self._report(call, text, is_error, record)
                self._running.remove(call)
                self._begin()
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 -- a thread's error must not pass as a call that still runs
            refuse(f"what to do after {error!r}")

    def _report(self, call: dict[str, Any], text: str, is_error: bool, record: Any) -> None:
        block = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        block |= {"is_error": is_error} if is_error or call["name"] == "Bash" else {}
        self.results.append(block)
        self._turn.lines.say(
            "user", message={"role": "user", "content": [block]}, parent_tool_use_id=None, tool_use_result=record
        )

    def _run(self, call: dict[str, Any]) -> tuple[str, bool, Any]:
        """Request permission for a call and run it.

        Return the result's text, whether it is an error, and the record.
        """
        turn, tool, given = self._turn, call["name"], call["input"]
        if call["invalid"] is not None:
            return f"<tool_use_error>{call['invalid']}</tool_use_error>", True, call["invalid"]
        asks = {"tool_name": tool, "tool_use_id": call["id"]}
        whole = {**given, "file_path": turn.tools.path(given)} if "file_path" in given else given
        before = turn.hook("PreToolUse", **asks, tool_input=given)
        if before is None:
            return REJECTED, True, "User rejected tool use"
        ruled = before.get("hookSpecificOutput", {})
        if (decision := ruled.get("permissionDecision")) == "deny":
            return ruled["permissionDecisionReason"], True, f"Error: {ruled['permissionDecisionReason']}"
        if decision != "ask":
            refuse(f"the hook's decision {decision!r}")
        more = (
            {"requires_user_interaction": True}
            if tool in INTERACTIVE
            else {"description": given.get("description", ""), "decision_reason": ruled["permissionDecisionReason"]}
        )
        answer = turn.lines.request(
            turn.aborted, subtype="can_use_tool", **asks, display_name=tool, input=whole, **more
        )
        if answer is None or turn.aborted.is_set():
            return REJECTED, True, "User rejected tool use"
        if answer["behavior"] != "allow":
            turn.denials.append({**asks, "tool_input": given})
            if answer.get("interrupt"):
                self.stopped = True
                return REJECTED, True, "User rejected tool use"
            return answer["message"], True, f"Error: {answer['message']}"
        judged = answer["updatedInput"]
        ran = {} if tool == "ExitPlanMode" else judged
        if tool == "ExitPlanMode":
            turn.leave_plan_mode()
        if tool == "EnterPlanMode":
            turn.enter_plan_mode()
        try:
            text, record = turn.tools.run(tool, judged, turn.aborted)
        except ToolError as error:
            if turn.aborted.is_set():
                return CUT_SHORT, True, "User rejected tool use"
            turn.hook("PostToolUseFailure", **asks, tool_input=ran, error=str(error), is_interrupt=False)
            return str(error), True, f"Error: {error}"
        if tool == "Write":  # the real CLI's text has the path as the model wrote it
            text = text.replace(whole["file_path"], given["file_path"], 1)
        after = turn.hook("PostToolUse", **asks, tool_input=ran, tool_response=record)
        if (after or {}).get("continue") is False:
            refuse("how a hook stops a turn")
        return text, False, record


class Turn:
    """One turn, from its prompt to its result line."""

    def __init__(self, cli: Cli) -> None:
        self._cli = cli
        self.lines, self.tools, self.conversation = cli.lines, cli.tools, cli.conversation
        self.aborted = cli.provider.aborted
        self.denials: list[dict[str, Any]] = []
        self._requests = 0
        self._began = time.monotonic()
        self._left_plan_mode = self._entered_plan_mode = False
        self._usage: dict[str, Any] = {}
        self._begun = False
        """Whether the answer that was broken off had begun."""
        self._failed: dict[str, Any] = {}
        """What the result line says of a failed request."""

    def hook(self, event: str, **fields: Any) -> dict[str, Any] | None:
        """Call the hooks of an event. Return the last one's response, or None if the turn was interrupted first."""
        said: dict[str, Any] | None = {}
        for name in self._cli.hooks.get(event, ()):
            about = {
                "hook_event_name": event,
                "session_id": self.conversation.id,
                "cwd": self.conversation.cwd,
                **fields,
            }
            about |= {"transcript_path": self.conversation.path, "permission_mode": self._cli.mode}
            request = {"subtype": "hook_callback", "callback_id": name, "input": about}
            said = self.lines.request(self.aborted, **request, tool_use_id=fields["tool_use_id"])
        return said

    def enter_plan_mode(self) -> None:
        """Change to the mode for planning."""
        self._entered_plan_mode = True
        self._cli.set_mode("plan")

    def leave_plan_mode(self) -> None:
        """Return to the mode before planning."""
        self._left_plan_mode = True
        self._cli.set_mode("default")

    def play(self, prompt: Any, uuid: str) -> None:
        """Play the turn and write its result line."""
        cli = self._cli
        self.lines.say("command_lifecycle", command_uuid=uuid, state="started")
        self._introduce()
        self.conversation.add("user", prompt, uuid)
        if cli.mode == "plan":
            self.conversation.add("system", _plan_mode(self.conversation.plan))
        try:
            self._result(**self._requests_until_the_end())
        except AbortedError:
            self._say_interrupted("[Request interrupted by user]")
            if self._begun:
                self._end_stream()
            self._result(**_aborted("aborted_streaming"))
        state = "cancelled" if self.aborted.is_set() else "completed"
        self.lines.say("command_lifecycle", command_uuid=uuid, state=state)

    def compact(self, command: str, uuid: str) -> None:
        """Replace the conversation by the summary that the model writes."""
        cli, conversation = self._cli, self.conversation
        self.lines.say("command_lifecycle", command_uuid=uuid, state="started")
        self.lines.system("status", status="compacting")
        words = command.removeprefix("/compact").strip()
        request = {
            "role": "user",
            "content": f"{SUMMARISE}\n\nAdditional Instructions:\n{words}" if words else SUMMARISE,
        }
        body = cli.body()
        text = ""
        for event in cli.provider.events({**body, "messages": [*body["messages"], request]}):
            match event["type"]:
                case "message_start":
                    self._usage = event["message"]["usage"]
                case "content_block_delta":
                    text += event["delta"]["text"]
                case "message_delta":
                    self._usage = {**self._usage, **event.get("usage", {})}
        conversation.count(cli.model, self._usage)
        summary = f"{SUMMARY}\n{text.partition('<summary>')[2].partition('</summary>')[0] or text}"
        said = "<local-command-stdout>Compacted </local-command-stdout>"
        names = f"<command-name>/compact</command-name><command-args>{words}</command-args>"
        conversation.compact([{"role": "user", "content": one} for one in (summary, names, said)], uuid)
        self.lines.system("status", status=None, compact_result="success")
        self._introduce()
        self.lines.system("compact_boundary", compact_metadata={"trigger": "manual"})
        for content, more in ((summary, {"isReplay": False, "isSynthetic": True}), (said, {"isReplay": True})):
            self.lines.say("user", message={"role": "user", "content": content}, parent_tool_use_id=None, **more)
        ended = {"subtype": "success", "is_error": False, "result": "", "local_command": "compact", "num_turns": 0}
        self.lines.say("result", **ended, modelUsage=conversation.sums, usage={})
        self.lines.say("command_lifecycle", command_uuid=uuid, state="completed")

    def _introduce(self) -> None:
        cli = self._cli
        self.lines.system(
            "init",
            cwd=self.conversation.cwd,
            tools=[*cli.offered],
            mcp_servers=[],
            model=cli.model,
            permissionMode=cli.mode,
            claude_code_version=VERSION,
        )

    def _requests_until_the_end(self) -> dict[str, Any]:
        """Return the fields of the result line."""
        while True:
            answer, calls = self._ask()
            if isinstance(answer, str):
                return self._failed | {"subtype": "success", "is_error": True, "result": answer}
            self._requests += 1
            if not any(block["type"] == "tool_use" for block in answer):
                text = next((block["text"] for block in reversed(answer) if block["type"] == "text"), "")
                return {"subtype": "success", "is_error": False, "result": text, "terminal_reason": "completed"}
            self.conversation.add("user", calls.finish())
            if self.aborted.is_set() or calls.stopped:
                self._say_interrupted("[Request interrupted by user for tool use]")
                return _aborted("aborted_tools")
            if self._entered_plan_mode:
                self.conversation.add("system", _plan_mode(self.conversation.plan))
                self._entered_plan_mode = False
            if self._left_plan_mode:
                self.conversation.add("system", "## Exited Plan Mode\n\nYou have exited plan mode.")
                self._left_plan_mode = False
            if self._requests == self._cli.max_turns:
                errors = [f"Reached maximum number of turns ({self._requests})"]
                ended = {"subtype": "error_max_turns", "terminal_reason": "max_turns"}
                return {**ended, "is_error": True, "errors": errors}

    def _say_interrupted(self, text: str) -> None:
        block = {"type": "text", "text": text}
        self.conversation.add("user", [block])
        self.lines.say("user", message={"role": "user", "content": [block]}, parent_tool_use_id=None)

    def _result(self, **fields: Any) -> None:
        sums = self.conversation.sums
        self.lines.say(
            "result",
            **{"api_error_status": None, **fields},
            duration_ms=round((time.monotonic() - self._began) * 1000),
            num_turns=max(1, self._requests),
            total_cost_usd=sum(one["costUSD"] for one in sums.values()),
            modelUsage=sums,
            usage={},
            permission_denials=self.denials,
        )

    # ------------------------------------------------------------ one request

    def _ask(self) -> tuple[list[dict[str, Any]] | str, Calls]:
        """Return the blocks of the model's answer, or the text of its failure; and the calls that have begun."""
        attempt = repeats = 0
        while True:
            if not repeats:
                self.lines.system("status", status="requesting") if not attempt else None
            try:
                return self._answer()
            except RefusedError as error:
                status: int | None = error.status
                if repeats < SILENT_REPEATS.get(error.status, 0):
                    repeats += 1
                    continue
                word = RETRIED.get(error.status, "server_error" if error.status >= 500 else "")
                retry, after, begun = bool(word) and not error.begun, error.retry_after, error.begun
                text = self._refusal(error)
                more: dict[str, Any] = {"api_error_status": status}
            except LostError as error:
                begun = error.args[0]
                status, word, retry, after = None, "unknown", True, 0.0
                text = (
                    "API Error: Connection to the API was lost (ECONNRESET). This is usually temporary — try again."
                    if begun
                    else "API Error: Connection dropped (ECONNRESET). Check the gateway set in ANTHROPIC_BASE_URL, then"
                    " try again."
                )
                more = {"api_error": "connection_failed"}
                if begun:
                    self.conversation.count(self._cli.model, self._usage)
            attempt += 1
            if not retry or attempt > self._cli.retries:
                return self._fail(text, more, begun=begun)
            delay = max(after, 0.5 * 2 ** (attempt - 1) * random.uniform(1, 1.25))
            told = {"retry_delay_ms": round(delay * 1000), "error_status": status, "error": word}
            self.lines.system("api_retry", attempt=attempt, max_retries=self._cli.retries, **told)
            if self.aborted.wait(delay):
                raise AbortedError

    def _refusal(self, error: RefusedError) -> str:
        if error.begun:
            return f"API Error: {error.message}"
        form = REFUSALS.get(error.status, SERVER_FAILED if error.status >= 500 else "")
        if not form:
            refuse(f"the message about a refusal with status {error.status}")
        return form.format(status=error.status, message=error.message, host=self._cli.provider.host)

    def _fail(self, text: str, more: dict[str, Any], *, begun: bool) -> tuple[str, Calls]:
        message = {
            "id": new_id(),
            "role": "assistant",
            "model": "<synthetic>",
            "content": [{"type": "text", "text": text}],
        }
        self.lines.say("assistant", message=message, parent_tool_use_id=None, is_api_error_message=True, **more)
        if begun:
            self._end_stream()
        self._failed = {"terminal_reason": "api_error", **more}
        return text, Calls(self)

    def _answer(self) -> tuple[list[dict[str, Any]], Calls]:
        """Relay one answer of the model. Its calls begin as they arrive."""
        cli, blocks, calls = self._cli, [], Calls(self)
        self._usage, self._begun = {}, False
        message: dict[str, Any] = {}
        current: dict[str, Any] = {}
        pieces: list[str] = []
        try:
            for event in cli.provider.events(cli.body()):
                kind = event["type"]
                if kind == "message_start":
                    message = event["message"]
                    self._usage = message["usage"]
                elif kind == "content_block_start":
                    current, pieces = dict(event["content_block"]), []
                elif kind == "content_block_delta":
                    _grow(current, pieces, event["delta"])
                elif kind == "content_block_stop":
                    if current["type"] == "tool_use":
                        current["input"] = json.loads("".join(pieces) or "{}")
                    blocks.append(dict(current))
                    self._say_block(message, self._as_shown(current))
                    if current["type"] == "tool_use":
                        calls.add({**self._as_shown(current)})
                    current = {}
                elif kind == "message_delta":
                    self._usage = {**self._usage, **event.get("usage", {})}
                elif kind != "message_stop":
                    continue
                self.lines.say("stream_event", event=event, parent_tool_use_id=None)
        except AbortedError:
            if message:
                cli.conversation.count(cli.model, self._usage)
            if current.get("type") == "text" and current["text"]:
                blocks.append(current)
                self._say_block(message, current, aborted=True)
            if any(block["type"] == "tool_use" for block in blocks):
                self.conversation.add("assistant", blocks)
                self.conversation.add("user", calls.finish())
            elif blocks:
                self.conversation.add("assistant", blocks)
            self._begun = bool(message)
            raise
        cli.conversation.count(cli.model, self._usage)
        self.conversation.add("assistant", blocks)
        return blocks, calls

    def _as_shown(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return the block as the CLI shows it: some inputs get fields that the model omitted."""
        if block["type"] != "tool_use":
            return block
        given = block["input"]
        if block["name"] == "Edit":
            given = {"replace_all": False, **given}
        if block["name"] == "ExitPlanMode":
            given = {"plan": _read(self.conversation.plan), "planFilePath": self.conversation.plan}
        return {**block, "input": given}

    def _say_block(self, message: dict[str, Any], block: dict[str, Any], **more: Any) -> None:
        self.lines.say("assistant", message={**message, "content": [block]}, parent_tool_use_id=None, **more)

    def _end_stream(self) -> None:
        """Write the lines that end a stream that broke off."""
        ends: tuple[dict[str, Any], ...] = (
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": self._usage},
            {"type": "message_stop"},
        )
        for event in ends:
            self.lines.say("stream_event", event=event, parent_tool_use_id=None)


def _grow(block: dict[str, Any], pieces: list[str], delta: Mapping[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case "input_json_delta":
            pieces.append(delta["partial_json"])
        case kind:
            refuse(f"the delta {kind!r}")


def _aborted(reason: str) -> dict[str, Any]:
    errors = ["[ede_diagnostic] result_type=user last_content_type=n/a stop_reason=null"]
    return {"subtype": "error_during_execution", "is_error": True, "errors": errors, "terminal_reason": reason}


def _plan_mode(path: str) -> str:
    return (
        "Plan mode is active. The user indicated that they do not want you to execute yet.\n\n## Plan File Info:\n"
        f"No plan file exists yet. You should create your plan at {path} using the Write tool."
    )


# ---------------------------------------------------------------- the program


class Cli:
    """The program: its settings, its conversation, and the control requests that it answers."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.lines = Lines()
        self.provider = Provider()
        self.mode = options.get("permission-mode", "default")
        self.model = options.get("model", MODEL)
        self.max_turns = int(options.get("max-turns", 0))
        self.retries = int(os.environ.get("CLAUDE_CODE_MAX_RETRIES", 10))
        self.hooks: dict[str, list[str]] = {}
        withheld = options.get("disallowedTools", "").split(",")
        self.offered = [name for name in INPUTS if name not in withheld]
        self._system = self._system_prompt(options)
        if options.get("mcp-config"):
            refuse("MCP servers")
        self.conversation = Conversation(options)
        self.lines.session = self.conversation.id
        self.tools = Tools(self.conversation)
        self._prompts: list[tuple[Any, str, bool]] = []
        self._no_commands = "disable-slash-commands" in options
        self._changed = threading.Condition()
        self._playing = False

    @staticmethod
    def _system_prompt(options: Mapping[str, str]) -> list[dict[str, str]]:
        own = f"You are a rehearsed agent.\n\n# Environment\n - Primary working directory: {os.getcwd()}"
        if path := options.get("system-prompt-file"):
            own = _read(path)
        added = [_read(path)] if (path := options.get("append-system-prompt-file")) else []
        return [{"type": "text", "text": text} for text in (own, *added)]

    def body(self) -> dict[str, Any]:
        """Return the body of the next request to the model."""
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in self.offered]
        more = {"system": self._system, "tools": tools, "max_tokens": 32_000, "stream": True}
        return {"model": self.model, "messages": self.conversation.sent(), **more}

    def set_mode(self, mode: str) -> None:
        """Change the permission mode, and report it if it is a different one."""
        if mode == self.mode:
            return
        self.mode = mode
        self.lines.system("status", status=None, permissionMode=mode)

    def serve(self) -> None:
        """Handle lines until standard input ends and the last turn has ended."""
        threading.Thread(target=self._play, daemon=True).start()
        for line in sys.stdin.buffer:
            message = json.loads(line)
            match message["type"]:
                case "control_response":
                    self.lines.answered(message["response"])
                case "control_request":
                    self._control(message["request_id"], message["request"])
                case "user":
                    self._submit(message["message"]["content"], message["uuid"], message.get("client_composed"))
                case kind:
                    refuse(f"a line {kind!r}")
        with self._changed:
            self._changed.wait_for(lambda: not self._playing and not self._prompts)

    def _submit(self, prompt: Any, uuid: str, composed: bool | None) -> None:
        """Queue a prompt, unless the conversation already contains it."""
        is_command = not composed
        if is_command and (self._no_commands or not prompt.startswith("/compact")):
            refuse("how a prompt that it may interpret is played")
        if uuid in self.conversation.prompts:
            self.lines.say("command_lifecycle", command_uuid=uuid, state="completed")
            return
        self.lines.say("command_lifecycle", command_uuid=uuid, state="queued")
        with self._changed:
            self._prompts.append((prompt, uuid, is_command))
            self._changed.notify_all()

    def _play(self) -> None:
        try:
            while True:
                with self._changed:
                    self._playing = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: bool(self._prompts))
                    prompt, uuid, is_command = self._prompts.pop(0)
                    self._playing = True
                    self.provider.aborted.clear()
                turn = Turn(self)
                (turn.compact if is_command else turn.play)(prompt, uuid)
        except BaseException as error:  # noqa: BLE001 -- a thread's error must not pass as a turn that still runs
            import traceback

            traceback.print_exc()
            refuse(f"what to do after {error!r}")

    def _control(self, name: str, request: dict[str, Any]) -> None:
        match request["subtype"]:
            case "initialize":
                for event, matchers in (request.get("hooks") or {}).items():
                    self.hooks[event] = [one for matcher in matchers for one in matcher["hookCallbackIds"]]
                about = {"commands": [], "agents": [], "models": [], "output_style": "default", "pid": os.getpid()}
                about |= {"hooks_applied": True, "hook_on_failure_supported": True}
                self.lines.respond(name, {**about, "claude_code_version": VERSION})
            case "interrupt":
                with self._changed:
                    if self._playing:
                        self.provider.abort()
                        self.lines.give_up()
                        self.tools.kill()
                self.lines.respond(name, {"still_queued": []})
            case "set_permission_mode":
                self.lines.respond(name, {"mode": request["mode"]})
                self.set_mode(request["mode"])
            case "get_usage":
                self.lines.respond(name, {"session": {"model_usage": self.conversation.sums}})
            case "mcp_status":
                self.lines.respond(name, {"mcpServers": []})
            case subtype:
                self.lines.respond(name, None, f"Unsupported control request subtype: {subtype}")


def run() -> NoReturn:
    """Run the program, and end at once even if threads are left."""
    Cli(options_of(sys.argv[1:])).serve()
    os._exit(0)


if __name__ == "__main__":
    run()
