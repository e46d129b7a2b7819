"""Claude Code through claude-agent-sdk, which is imported without the package `mcp`."""

from hutch_executor.runners.claude import mcp_stand_in

mcp_stand_in.install()
