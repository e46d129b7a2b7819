"""Finds what a request would let the provider do with the provider's own network. Pure.

A session with a limited network reaches its model and nothing else. The provider's tools would undo that: the model
can be told to fetch a page, to search, to run code or to call an MCP server, and each of them carries data out. So a
request of such a session may contain only what is known to have no network of its own:

- tools that the client carries out (`_CLIENT_TOOLS`; in Gemini's dialect only function declarations). It is a list of
  what is allowed: a tool that no version of Hutch has heard of is refused.
- no field that turns a tool of the provider on without an entry in `tools` (`_FIELDS`), and no model that searches by
  itself.
- no file, page or image by its address: the provider would fetch it, and the address can carry data out.

Parsers differ in what they make of a key that appears twice, so a request with one is refused too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from hutch_broker.judge import Refusal
from hutch_shared.broker_link import DialectName
from hutch_shared.messages import Network

__all__ = ["check_network"]

_CLIENT_TOOLS: Final = re.compile(
    r"custom|function|local_shell|apply_patch"
    r"|(bash|text_editor|computer|memory)_\d{8}"
    r"|tool_search|tool_search_tool_(regex|bm25)(_\d{8})?"
)
"""The values of a tool's `type` that the client carries out, or that only look through the request's own tools.

From the providers' documents. `computer_` with a date is Anthropic's; OpenAI's have no date.
"""
_GEMINI_TOOLS: Final = frozenset(("functionDeclarations", "function_declarations"))
_CONVERSE_TOOLS: Final = frozenset(("toolSpec", "cachePoint"))
_FIELDS: Final[dict[DialectName, tuple[str, ...]]] = {
    "anthropic": ("mcp_servers", "container"),
    "bedrock": ("mcp_servers", "container"),
    "vertex": ("mcp_servers", "container"),
    "openai": (
        "mcp_servers",
        "web_search_options",
        "search_parameters",
        "enable_search",
        "plugins",
        "extra_body",
    ),
    "gemini": ("cachedContent", "cached_content"),
}
"""Fields that give a request tools of the provider. Some are of gateways that speak OpenAI's dialect."""
_SEARCHING_MODEL: Final = re.compile(r"search-(preview|api)|deep-research|:online\b|(^|/)sonar\b|(^|/)compound\b")
"""Models that use the network by themselves."""
_CONVERSATION: Final = ("messages", "system", "input", "contents", "systemInstruction", "system_instruction")
_DATA: Final = frozenset(("args", "response", "arguments"))
"""The input and the result of a tool that the client has run."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_network(dialect: DialectName, network: Network | None, body: bytes) -> Refusal | None:
    """Return why the body of a request does not fit the session's network; None if it does.

    `network` None is that of a lease from an earlier hutchd, which did not say: it counts as limited.
    """
    if network == "full":
        return None
    try:
        asked = json.loads(body.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return Refusal(
            400,
            "invalid_request_error",
            "The session's network is limited, and the request is not JSON that can be read in only one way.",
        )
    if not isinstance(asked, dict):
        return Refusal(
            400, "invalid_request_error", "The session's network is limited, and the request is not an object."
        )
    found = next(_findings(dialect, asked), None)
    if found is None:
        return None
    limited = f'[sandbox] network = "{network}"' if network is not None else "a limited network"
    return Refusal(
        403,
        "permission_error",
        f"The session has {limited}, so the request may not have {found}: the provider would use its own network for"
        " it. The request was not sent.",
    )


def _without_duplicates(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) != len(members):
        raise ValueError("a key appears twice")
    return made


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _findings(dialect: DialectName, asked: dict[str, Any]) -> Iterator[str]:
    """Yield what the provider would do with its own network, as nouns for a sentence."""
    yield from (f"`{name}`" for name in _FIELDS[dialect] if asked.get(name))
    model = asked.get("model")
    if isinstance(model, str) and _SEARCHING_MODEL.search(model):
        yield "a model that searches by itself"
    if dialect == "openai" and isinstance(asked.get("prompt"), dict):
        yield "a prompt that the provider keeps"
    if dialect == "gemini":
        yield from _in_untagged(asked.get("tools"), _GEMINI_TOOLS)
    else:
        yield from _in_tagged(asked.get("tools"))
    if dialect == "bedrock":
        yield from _in_converse(asked)
    for name in _CONVERSATION:
        yield from _in_conversation(asked.get(name))


def _in_tagged(tools: Any) -> Iterator[str]:
    """Yield the tools with a `type` that is not a client's."""
    left = [tools]
    while left:
        entries = left.pop()
        if not isinstance(entries, list | None):
            yield "tools that are not a list"
            return
        for tool in entries or ():
            if not isinstance(tool, dict):
                yield "a tool that is not an object"
                continue
            match tool.get("type"):
                case None:
                    pass
                case "namespace":
                    left.append(tool.get("tools"))
                case "shell" if _get(tool, "environment", "type") == "local":
                    pass
                case str() as kind if _CLIENT_TOOLS.fullmatch(kind):
                    pass
                case kind:
                    yield f"the tool {_shown(kind)}"


def _in_untagged(tools: Any, allowed: frozenset[str]) -> Iterator[str]:
    """Yield the tools that are named by their only key."""
    if not isinstance(tools, list | None):
        yield "tools that are not a list"
        return
    for tool in tools or ():
        if not isinstance(tool, dict):
            yield "a tool that is not an object"
        else:
            yield from (f"the tool {_shown(name)}" for name in tool if name not in allowed)


def _in_converse(asked: dict[str, Any]) -> Iterator[str]:
    yield from _in_untagged(_get(asked, "toolConfig", "tools"), _CONVERSE_TOOLS)
    further = asked.get("additionalModelRequestFields")
    if isinstance(further, dict):
        yield from _findings("anthropic", further)


def _in_conversation(value: Any) -> Iterator[str]:
    """Yield the files that are named by an address, and the tools that a part of the conversation adds.

    What tools were given and what they returned as data is not looked at: the provider does not interpret it.
    """
    left: list[Any] = [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left.extend(one)
        elif isinstance(one, dict):
            if _has_address(one):
                yield "a file or image by its address"
            if isinstance(tools := one.get("tools"), list):
                yield from _in_tagged(tools)
            is_call = "tool_use" in str(one.get("type"))
            left.extend(part for name, part in one.items() if name not in _DATA and not (is_call and name == "input"))


def _has_address(block: dict[str, Any]) -> bool:
    source, image = block.get("source"), block.get("image_url")
    if isinstance(source, dict) and (source.get("type") == "url" or "s3Location" in source):
        return True
    if isinstance(image, dict):
        image = image.get("url")
    if isinstance(image, str) and not image.startswith("data:"):
        return True
    return bool(block.get("file_url")) or any(isinstance(block.get(name), dict) for name in ("fileData", "file_data"))


def _get(of: Any, *names: str) -> Any:
    for name in names:
        of = of.get(name) if isinstance(of, dict) else None
    return of


def _shown(name: object) -> str:
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "of an unknown type"
