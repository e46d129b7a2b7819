"""How the Claude CLI is started for a session: its arguments, its environment, and the features that it may not use.

Settings files of the project and the account are not loaded (`--setting-sources=`): hooks, `env` and helpers in them
are commands that run unasked. `instructions` reads the text files beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import claude_agent_sdk

from hutch_executor.account.environment import ALLOWED_ENVIRONMENT, TEMPORARY
from hutch_executor.runners.claude.shell import shell_variables
from hutch_executor.runners.claude.spawn import Launch
from hutch_executor.sandbox.command import SandboxedCommand, SessionSandbox, git_settings
from hutch_executor.sandbox.project_programs import git_reading
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.secret import Secret

__all__ = ["build", "bundled_cli", "cli_mode", "sandboxed"]

_DISALLOWED: Final = (
    # These tools act later, when no turn is running:
    "CronCreate",
    "CronDelete",
    "CronList",
    "Monitor",
    "ScheduleWakeup",
    # These act elsewhere: in other sessions, other worktrees, the vendor's cloud, or scripts that call tools:
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

_NO_SOCKET: Final = {"XDG_RUNTIME_DIR": "/proc"}
"""The CLI makes no socket below /proc. With one, a process of the account could send the model messages.

In a sandbox of another uid than 0 the CLI does not trust the owner of /proc. It would use a folder in /tmp instead,
whose name is taken there.
"""

_ARGUMENTS: Final = (
    *("--output-format", "stream-json", "--input-format", "stream-json", "--verbose", "--include-partial-messages"),
    *("--permission-prompt-tool", "stdio"),
    "--setting-sources=",
    '--settings={"skipWebFetchPreflight":true}',  # the check sends the vendor each host that a tool call names
    "--strict-mcp-config",
)

_NO_COMMANDS: Final = "--disable-slash-commands"
"""Some commands run shell commands by themselves. Prompts are words for the model in any case (see `prompt`)."""

_FIXED: Final = {
    "CLAUDE_CODE_ENTRYPOINT": "sdk-py",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",  # notes of the agent's own would go into every request
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",  # a task that outlives the turn could wake the model
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_WORKFLOWS": "1",
    "CLAUDE_CODE_DISABLE_FILE_MENTIONS": "1",  # `@path` in a prompt would read a file without a tool call
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",  # the fallback is silent for minutes, like a stalled stream
    "CLAUDE_BASH_MAINTAIN_PROJECT_WORKING_DIR": "1",
    "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
    "ENABLE_TOOL_SEARCH": "0",  # the model gets every tool from the start
}


def build(
    session: m.PrepareSession,
    grant: m.KeyGrant,
    conversation: tuple[str, ...],
    text: str,
    *,
    cli: str,
    config: str,
    retries: int,
    stream_idle: float,
    environ: Mapping[str, str] = os.environ,
    commands: bool = False,
) -> Launch:
    """Return how to start the CLI for `session`; `conversation` are the arguments that name the conversation.

    With `commands` it knows its built-in commands; with `hooks.options` for that, the model sees no difference. `text`
    is appended to the system prompt; `config` is the CLI's configuration directory. The CLI retries a failed model
    request `retries` times. A request has failed if its answer has not begun, or its stream is silent, for
    `stream_idle` seconds; the CLI accepts no less than 10.
    """
    options = session.options
    argv = [
        cli,
        *_ARGUMENTS,
        *(() if commands else (_NO_COMMANDS,)),
        "--permission-mode",
        cli_mode(session.permission_mode),
        f"--disallowedTools={','.join([*_DISALLOWED, *(['Skill'] if commands else []), *options.disallowed_tools])}",
        *conversation,
    ]
    if options.allowed_tools:  # this allows no call by itself: the hook comes first
        argv.append(f"--allowedTools={','.join(options.allowed_tools)}")
    if options.model:
        argv.append(f"--model={options.model}")
    if session.limits.max_turns:
        argv.append(f"--max-turns={session.limits.max_turns}")
    env = {name: value for name, value in environ.items() if ALLOWED_ENVIRONMENT.fullmatch(name)}
    env |= shell_variables(env, in_sandbox=session.sandbox is not None)
    env |= {"HOME": session.home, "PWD": session.cwd} | _FIXED | _NO_SOCKET | git_settings()
    env |= git_reading(env.get("PATH", os.defpath), _changeable(session, config))
    env["CLAUDE_CONFIG_DIR"] = config
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
    return Launch(tuple(argv), session.cwd, env, key, documents)


def _changeable(session: m.PrepareSession, config: str) -> tuple[str, ...]:
    """Return the places that the session's agent may change."""
    write = session.sandbox.write if session.sandbox is not None else ()
    return (session.cwd, config, *TEMPORARY, *write)


def sandboxed(
    launch: Launch, session: m.PrepareSession, grant: m.KeyGrant, sandbox: SessionSandbox
) -> tuple[Launch, SandboxedCommand]:
    """Return `launch` in the session's sandbox, and the command to close at its end. Blocks.

    Beside the working directory the agent can write only the session's own configuration directory.
    `isolation_unavailable` if the sandbox cannot be made; `agent_unavailable` if the model could not be reached from
    inside.
    """
    if session.sandbox is not None and session.sandbox.network == "broker-only" and grant.unix_socket is None:
        why = (
            'The settings let an agent reach its model only through the broker ([sandbox] network = "broker-only"),'
            " but this agent gets its key directly."
        )
        raise HutchError(Reason.AGENT_UNAVAILABLE, why)
    command = sandbox.wrap(
        launch.argv,
        launch.env,
        show=(os.path.dirname(os.path.realpath(launch.argv[0])),),
        write=(launch.env["CLAUDE_CONFIG_DIR"],),
        sockets=(os.path.dirname(grant.unix_socket),) if grant.unix_socket else (),
        taken=sorted({f"/tmp/cc-socks-{uid}" for uid in (0, os.getuid())}),  # noqa: S108  see _NO_SOCKET
    )
    env = {**command.env, **_NO_SOCKET}
    if "TMPDIR" in env:  # without /tmp the CLI needs another place
        env["CLAUDE_CODE_TMPDIR"] = env["TMPDIR"]
    return replace(launch, argv=command.argv, env=env, inherited=command.descriptors), command


def cli_mode(mode: m.PermissionMode) -> str:
    """Return the CLI's mode: `plan`, which the model must know, or `default`. hutchd decides everything else."""
    return "plan" if mode == "plan" else "default"


def bundled_cli() -> str:
    """Return the path of the CLI that comes with the SDK; `agent_unavailable` if this build has none."""
    path = Path(claude_agent_sdk.__file__).with_name("_bundled") / "claude"
    if not os.access(path, os.X_OK):
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"The Claude CLI at {path} is missing, or may not be run.")
    return str(path)
