"""The Claude runner loads the SDK without the package `mcp`."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from hutch_executor.runners.claude.runner import ClaudeRunner
ClaudeRunner.preload()
print(sorted({'mcp', 'pydantic', 'starlette', 'uvicorn', 'httpx'} & {*sys.modules}))
import claude_agent_sdk
try:
    claude_agent_sdk.create_sdk_mcp_server("server", tools=[])
except RuntimeError as error:
    print(error)
"""


def test_the_runner_loads_a_stand_in() -> None:
    """The dependencies of mcp are not loaded, and the SDK refuses to make an MCP server in its own process."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded, refusal = done.stdout.splitlines()
    assert loaded == "['mcp']"
    assert refusal == "executors do not load the package mcp: MCP servers run outside the SDK"


def test_a_process_with_the_real_mcp_keeps_it() -> None:
    """A process that imported mcp before the runner goes on with it."""
    code = "import mcp.types, hutch_executor.runners.claude, mcp; print(mcp.types.Tool(name='t', inputSchema={}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "t\n"
