"""The digest that binds a decision to exactly the input that was judged."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["input_digest"]


def input_digest(agent_tool: str, tool_input: dict[str, Any]) -> str:
    """Return the SHA-256 (hex) of the agent's tool name and its input in one canonical JSON spelling."""
    text = json.dumps([agent_tool, tool_input], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
