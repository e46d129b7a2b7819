"""How the Claude CLI is started for a session: its words, its environment, what it may not do by itself.

Settings files of the project and the account are not loaded (`--setting-sources=`): hooks, `env` and helpers in them
are commands that run unasked. The instructions beside them are only text, so they are brought in here, bounded, and
only from files that really lie in the project or in the account's own settings folder.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import claude_agent_sdk

from hutch_executor.account.environment import ALLOWED_ENVIRONMENT
from hutch_executor.runners.claude.process import Launch
from hutch_executor.sandbox.command import Enclosure, Entered, git_settings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret

__all__ = ["INSTRUCTIONS_LIMIT", "build", "bundled_cli", "cli_mode", "instructions", "transcripts_name", "walled"]

INSTRUCTIONS_LIMIT: Final = 64 * 1024
"""Bytes of instructions files that are read; what is beyond is left out, and the text says so."""

_OFF: Final = (
    # They act later, when no turn is there to answer for them …
    "CronCreate",
    "CronDelete",
    "CronList",
    "Monitor",
    "ScheduleWakeup",
    # … or elsewhere: in other sessions, other worktrees, the vendor's cloud, in scripts that call tools themselves.
    "EnterWorktree",
    "ExitWorktree",
    "ListAgents",
    "PushNotification",
    "RemoteTrigger",
    "SendMessage",
    "TeamCreate",
    "TeamDelete",
    "Workflow",
)

_WORDS: Final = (
    *("--output-format", "stream-json", "--input-format", "stream-json", "--verbose", "--include-partial-messages"),
    *("--permission-prompt-tool", "stdio"),
    "--setting-sources=",
    '--settings={"skipWebFetchPreflight":true}',  # it would tell the vendor each host that a tool call names
    "--strict-mcp-config",
    "--disable-slash-commands",  # some run shell lines of their own; a prompt is words for the model
)

_FIXED: Final = {
    "CLAUDE_CODE_ENTRYPOINT": "sdk-py",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",  # what runs on after the turn could wake the model by itself
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_WORKFLOWS": "1",
    "CLAUDE_CODE_DISABLE_FILE_MENTIONS": "1",  # `@path` in a prompt would read a file without a tool call
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",  # it is silent for minutes, like a stalled stream
    "CLAUDE_BASH_MAINTAIN_PROJECT_WORKING_DIR": "1",
    "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
    "ENABLE_TOOL_SEARCH": "0",  # every tool is told to the model from the start
}

_NAME_LIMIT: Final = 200
"""Beyond it the CLI cuts the name of a folder of conversations and adds a hash."""


def build(
    session: m.PrepareSession,
    grant: m.KeyGrant,
    conversation: tuple[str, ...],
    text: str,
    *,
    cli: str,
    retries: int,
    stream_idle: float,
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """Return how to start the CLI for `session`; `conversation` are the words that name what it goes on from.

    `text` is what is added to the system prompt. The CLI tries a model request again `retries` times; a stream that
    is silent for `stream_idle` seconds (it takes no less than 10), and an answer that has not begun by then, count as
    failed.
    """
    options = session.options
    words = [
        cli,
        *_WORDS,
        "--permission-mode",
        cli_mode(session.permission_mode),
        f"--disallowedTools={','.join([*_OFF, *options.disallowed_tools])}",
        *conversation,
    ]
    if options.allowed_tools:  # no call is spared the question by it: the hook comes first
        words.append(f"--allowedTools={','.join(options.allowed_tools)}")
    if options.model:
        words.append(f"--model={options.model}")
    if session.limits.max_turns:
        words.append(f"--max-turns={session.limits.max_turns}")
    env = {name: value for name, value in environ.items() if ALLOWED_ENVIRONMENT.fullmatch(name)}
    env |= {"HOME": session.home, "PWD": session.cwd} | _FIXED | git_settings()
    env["CLAUDE_CODE_MAX_RETRIES"] = str(retries)
    env["CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"] = str(round(stream_idle * 1000))
    env["API_TIMEOUT_MS"] = env["CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"]
    if base_url := grant.base_url or session.base_url:
        env["ANTHROPIC_BASE_URL"] = base_url
    if grant.unix_socket:
        env["ANTHROPIC_UNIX_SOCKET"] = grant.unix_socket
    documents = {}
    if options.mcp_servers:
        documents["--mcp-config"] = Secret(json.dumps({"mcpServers": options.mcp_servers}))
    if options.system_prompt:
        documents["--system-prompt-file"] = Secret(options.system_prompt)
    if text:
        documents["--append-system-prompt-file"] = Secret(text)
    variable = "OAUTH_TOKEN" if grant.auth == "bearer" else "API_KEY"
    key = {f"CLAUDE_CODE_{variable}_FILE_DESCRIPTOR": Secret(grant.value)}
    return Launch(tuple(words), session.cwd, env, key, documents)


def walled(
    launch: Launch, session: m.PrepareSession, grant: m.KeyGrant, enclosure: Enclosure
) -> tuple[Launch, Entered]:
    """Return `launch` inside the walls of `session`, and what is to be closed at its end; `isolation_unavailable`.

    Of the CLI's own folder the agent has the transcripts of its working directory and no more: what it wrote to the
    rest would be run by the person's own CLI. Makes that folder, `agent_unavailable` when it cannot, or when no model
    could be reached; call it in a thread.
    """
    if session.sandbox is not None and session.sandbox.network == "broker-only" and grant.unix_socket is None:
        why = (
            'By the settings an agent reaches its model through the broker alone ([sandbox] network = "broker-only"),'
            " but its key is handed to it directly."
        )
        raise HutchError(Reason.AGENT_UNAVAILABLE, why)
    transcripts = Path(session.home, ".claude", "projects", transcripts_name(session.cwd))
    try:
        transcripts.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"The conversation could not be kept in {transcripts}: {error.strerror}."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
    # Its settings file too lies in its folder then, which it can write; beside the folder it may be hidden or
    # read-only, and the CLI tries for seconds to write it before it starts.
    entered = enclosure.enter(
        launch.argv,
        {**launch.env, "CLAUDE_CONFIG_DIR": str(Path(session.home, ".claude"))},
        show=(os.path.dirname(os.path.realpath(launch.argv[0])),),
        write=(str(transcripts),),
        sockets=(os.path.dirname(grant.unix_socket),) if grant.unix_socket else (),
    )
    return replace(launch, argv=entered.argv, env=entered.env, inherited=entered.descriptors), entered


def transcripts_name(cwd: str) -> str:
    """Return what the CLI calls the folder of the conversations in `cwd`, a real path.

    As JavaScript sees it: what is beyond the first plane of Unicode counts as two; the SDK's own function takes it for
    one, and the conversation would be kept in a folder that goes with the agent.
    """
    encoded = unicodedata.normalize("NFC", cwd).encode("utf-16-le", "surrogatepass")
    units = [int.from_bytes(encoded[at : at + 2], "little") for at in range(0, len(encoded), 2)]
    name = "".join(chr(unit) if unit < 128 and chr(unit).isalnum() else "-" for unit in units)
    if len(name) <= _NAME_LIMIT:
        return name
    total = 0
    for unit in units:
        total = (total * 31 + unit) & 0xFFFF_FFFF
    total, digits = min(total, 2**32 - total), ""  # the amount of the signed number
    while total or not digits:
        total, digit = divmod(total, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return f"{name[:_NAME_LIMIT]}-{digits}"


def cli_mode(mode: m.PermissionMode) -> str:
    """Return the CLI's mode: it is told of planning, since the model must know; all else hutchd decides."""
    return "plan" if mode == "plan" else "default"


def bundled_cli() -> str:
    """Return the CLI that came with the SDK; `agent_unavailable` when this build has none."""
    path = Path(claude_agent_sdk.__file__).with_name("_bundled") / "claude"
    if not os.access(path, os.X_OK):
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"The Claude CLI is missing, or may not be run, at {path}.")
    return str(path)


def instructions(cwd: str, home: str, which: Literal["all", "project", "none"] = "all") -> str:
    """Read the instructions files for a session in `cwd`: the account's own, then the project's, outermost first.

    With `project` the account's own are left out, with `none` all. Reads files; call it in a thread. What cannot be
    read is left out.
    """
    parts: list[str] = []
    left = INSTRUCTIONS_LIMIT
    for path, root in _instruction_files(Path(cwd), Path(home), which):
        with suppress(OSError, ValueError):
            real = path.resolve(strict=True)
            if not real.is_relative_to(root.resolve()) or not real.is_file():
                continue  # a link out of the project would hand a file to the model that nobody asked for
            with real.open("rb") as file:
                content = file.read(left + 1)
            if not content.strip():
                continue
            cut = "\n… (cut)" if len(content) > left else ""
            parts.append(f"Contents of {path}:\n\n{content[:left].decode(errors='replace')}{cut}")
            left -= min(left, len(content))
        if left <= 0:
            break
    if not parts:
        return ""
    return "\n\n".join(["The people of this project left these instructions. Follow them.", *parts])


def _instruction_files(cwd: Path, home: Path, which: str) -> Iterator[tuple[Path, Path]]:
    """Yield each candidate and the folder it must lie in."""
    if which == "none":
        return
    if which == "all":
        yield home / ".claude" / "CLAUDE.md", home
    project = [cwd]
    for folder in cwd.parents:
        if (project[-1] / ".git").exists():
            break
        project.append(folder)
    else:
        project = [cwd]  # no repository: only the folder itself
    for folder in reversed(project):
        yield folder / "CLAUDE.md", project[-1]
        yield folder / ".claude" / "CLAUDE.md", project[-1]
    yield cwd / "CLAUDE.local.md", project[-1]
