"""Starts the Claude CLI, and finds every process that came from it.

Secret documents (the key, MCP settings, prompts) reach the CLI through pipes. They are in no command line, environment
or file, and a pipe that was read is empty. The CLI's input and output are sockets: a command of the agent that looks
into the CLI in /proc can open its pipes and write there, but no socket. So it can neither answer permission requests
for hutchd, nor send the CLI control messages, nor speak as the CLI.

Every process of one start inherits a variable with a random mark, so that they can be killed even if the CLI is gone.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import Process, SocketStream
from claude_agent_sdk import CLIConnectionError

from hutch_executor.process.oom import agent_first
from hutch_executor.process.tools import find_tool
from hutch_shared.secret import Secret

__all__ = ["Launch", "feed", "kill_marked", "marked", "spawn"]

_FEED_DEADLINE: Final = 30.0
_MARK: Final = "HUTCH_AGENT_RUN"


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the CLI. It reads secret documents from pipes, which it finds by a variable or a flag."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    in_variables: Mapping[str, Secret] = field(default_factory=dict)
    """Secret documents, by the variable that gets the pipe's number."""
    after_flags: Mapping[str, Secret] = field(default_factory=dict)
    """Secret documents, by the flag that gets the pipe's path."""
    inherited: tuple[int, ...] = ()
    """Descriptors that the CLI inherits, under the same numbers."""
    umask: int = -1
    """The umask of the CLI; -1 for this process's own."""


async def spawn(launch: Launch, mark: str) -> tuple[Process, SocketStream, SocketStream, list[tuple[int, Secret]]]:
    """Start the CLI; return it, its input, its output, and the documents that `feed` must write.

    CLIConnectionError if it cannot be started. Then, and on cancel, neither a process nor a descriptor is left.
    """
    argv = [*agent_first((*_dies_with_us(), *launch.argv))]
    env = {**launch.env, _MARK: mark}
    readers: list[int] = []
    feeds: list[tuple[int, Secret]] = []
    given: list[socket.socket] = []
    streams: list[SocketStream] = []
    try:
        for _ in range(2):  # before the start: nothing may be awaited while only this function knows the process
            ours, theirs = socket.socketpair()
            given.append(theirs)
            streams.append(await SocketStream.from_socket(ours))
        for name, document in [*launch.in_variables.items(), *launch.after_flags.items()]:
            reader, writer = os.pipe()
            readers.append(reader)
            feeds.append((writer, document))
            if name in launch.in_variables:
                env[name] = str(reader)
            else:
                argv += [name, f"/dev/fd/{reader}"]
        process = await anyio.open_process(
            argv,
            stdin=given[0].fileno(),
            stdout=given[1].fileno(),
            cwd=launch.cwd,
            env=env,
            start_new_session=True,
            pass_fds=[*readers, *launch.inherited],
            umask=launch.umask,
        )
        return process, streams[0], streams[1], feeds
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            for stream in streams:
                await stream.aclose()
        for writer, _ in feeds:
            os.close(writer)
        if isinstance(error, OSError | ValueError):
            raise CLIConnectionError(f"The Claude CLI could not be started: {error}") from error
        raise
    finally:
        for theirs in given:
            theirs.close()
        for reader in readers:
            os.close(reader)


async def feed(documents: list[tuple[int, Secret]]) -> None:
    """Write the documents into their pipes and close these, also on cancel."""
    async with anyio.create_task_group() as group:
        for writer, document in documents:
            group.start_soon(_feed, writer, document)


def kill_marked(mark: str) -> bool:
    """Kill every process that came from the start with this mark; return whether there was one."""
    left = marked(mark)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def _dies_with_us() -> list[str]:
    """Return the prefix that makes the CLI die with this process. Without it the CLI would finish its turn alone."""
    setpriv = find_tool("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


async def _feed(writer: int, document: Secret) -> None:
    """Write the document and close the pipe. If the CLI dies first, its other streams show that."""
    os.set_blocking(writer, False)
    rest = document.reveal().encode()
    try:
        with anyio.move_on_after(_FEED_DEADLINE), suppress(BrokenPipeError):
            while rest:
                try:
                    rest = rest[os.write(writer, rest) :]
                except BlockingIOError:
                    await anyio.wait_writable(writer)
    finally:
        os.close(writer)


def marked(mark: str) -> list[int]:
    """Return the pids of live processes that came from the start with this mark. Linux only; elsewhere none."""
    variable = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
