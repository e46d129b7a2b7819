"""One turn of the real CLI in a sandbox, as this account: `sandboxed_claude.py ROOT SANDBOX NETWORK CLI COMMAND`.

SANDBOX is the path of bubblewrap, or `landlock`.

The model is the rehearsal model; without a network it is reached through a Unix socket, as the broker is. CLI is a
program to run instead of the CLI, or `-`. Prints the command's output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, cast

import anyio
from anyio.abc import ByteStream

from hutch_executor.runners.claude.runner import ClaudeRunner
from hutch_executor.runners.claude.turn import ClaudeTimeouts
from hutch_shared import messages as m
from tests.rehearsal import Say, Steps, Use, serve
from tests.system.claude_stage import KEY, FakeDaemon, allow

Network = Literal["full", "broker-only", "allow-list"]


async def main(root: Path, program: str, network: Network, cli: str, command: str) -> None:
    """Open a session, play one turn, and print the output."""
    cwd, home, broker = root / "work", root / "home", root / "broker"
    for path in (cwd, home, broker):
        path.mkdir()
    script = Steps(("go", Use("Bash", {"command": command})), ("", Say("done")))
    async with (
        serve(key=KEY, script=script) as model,
        await anyio.create_unix_listener(broker / "broker.sock") as listener,
        anyio.create_task_group() as group,
    ):
        host, port = model.url.removeprefix("http://").split(":")

        async def relay(client: ByteStream) -> None:
            async with client, await anyio.connect_tcp(host, int(port)) as server, anyio.create_task_group() as both:
                both.start_soon(pump, client, server)
                await pump(server, client)
                both.cancel_scope.cancel()

        group.start_soon(listener.serve, relay)
        grant = m.KeyGrant("lease", KEY, base_url="http://broker.invalid", unix_socket=str(broker / "broker.sock"))
        daemon, runner = FakeDaemon(grant, allow), ClaudeRunner(ClaudeTimeouts(retries=1), None if cli == "-" else cli)
        kind: m.SandboxKind = "landlock" if program == "landlock" else "bubblewrap"
        program = "" if kind == "landlock" else program
        sandbox = m.SandboxSpec(program, (str(root / "state"),), network=network, allow=("192.0.2.1",), kind=kind)
        options, limits = m.AgentOptions(), m.Limits()
        session = m.PrepareSession(
            *("s-1", "claude", str(cwd), "bypass", options, limits, str(root), str(home)), sandbox=sandbox
        )
        try:
            prepared = await runner.open(session, daemon)
            end = await runner.run(m.ExecutePrompt("s-1", "t-1", 1, "go"))
        finally:
            await runner.close()
        assert (prepared.keys, end.state) == ("brokered", "completed"), end
        print("\n".join(result.text for result in daemon.of("tool_result")))
        group.cancel_scope.cancel()


async def pump(source: ByteStream, sink: ByteStream) -> None:
    """Copy all data from `source` to `sink`."""
    async for chunk in source:
        await sink.send(chunk)


if __name__ == "__main__":
    given = Path(sys.argv[1]), sys.argv[2], cast("Network", sys.argv[3]), sys.argv[4], sys.argv[5]
    anyio.run(main, *given)
