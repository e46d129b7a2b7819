"""Converts parts to the Messages API's form: server-sent events, or one message. No I/O, and deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.rehearsal.odd import ODD_LINES
from tests.rehearsal.parts import (
    ABSENT,
    Cut,
    Drop,
    Odd,
    Part,
    Pause,
    Refuse,
    Replace,
    Request,
    Say,
    Stall,
    Think,
    Usage,
    Use,
)

SIGNATURE = "cmVoZWFyc2Fs"
Accident = Cut | Drop | Pause | Refuse | Stall

ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def dumps(value: Any) -> bytes:
    """Return compact JSON in raw UTF-8, as the provider sends it; a lone surrogate becomes its JSON escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def error(refusal: Refuse, reply_id: str) -> dict[str, Any]:
    """Return the API's form of an error."""
    kind = refusal.kind or ERROR_KINDS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": f"req_{reply_id}"}


def tokens_in(request: Request) -> int:
    """Return an estimate of the request's tokens, from its length alone."""
    return max(1, len(request.raw) // 4)


def _pieces(text: str, chunks: int) -> Iterator[str]:
    count = max(1, min(chunks, len(text)))
    for i in range(count):
        yield text[len(text) * i // count : len(text) * (i + 1) // count]


def _usage(request: Request, parts: Sequence[Part]) -> Usage:
    for part in parts:
        if isinstance(part, Usage):
            return part
    said = sum(
        len(p.text) if isinstance(p, Say | Think) else len(dumps(p.input))
        for p in parts
        if isinstance(p, Say | Think | Use)
    )
    return Usage(tokens_in(request), max(1, said // 4))


def _counts(usage: Usage, output: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "output_tokens": output,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
    }


def _stop_reason(parts: Sequence[Part]) -> str:
    return "tool_use" if any(isinstance(p, Use) for p in parts) else "end_turn"


def _message(request: Request, reply_id: str, counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.body.get("model", "rehearsal"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": counts,
    }


def _block(part: Say | Think | Use, use_id: str) -> dict[str, Any]:
    """Return the block as it is before its first delta."""
    match part:
        case Say():
            return {"type": "text", "text": ""}
        case Think():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Use():
            return {"type": "tool_use", "id": use_id, "name": part.tool, "input": {}}


def _deltas(part: Say | Think | Use) -> Iterator[dict[str, Any]]:
    match part:
        case Say():
            return ({"type": "text_delta", "text": piece} for piece in _pieces(part.text, part.chunks))
        case Think():
            return ({"type": "thinking_delta", "thinking": piece} for piece in _pieces(part.text, part.chunks))
        case Use():
            text = dumps(part.input).decode()
            return ({"type": "input_json_delta", "partial_json": piece} for piece in _pieces(text, part.chunks))


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def events(request: Request, parts: Sequence[Part], reply_id: str) -> Iterator[bytes | Accident]:
    """Yield the reply as whole SSE events, with the accidents between them."""
    replacements = [part for part in parts if isinstance(part, Replace)]
    for item in _items(request, parts, reply_id):
        if isinstance(item, dict):
            kind = item["type"]
            for one in replacements:
                if one.event == kind:
                    _replace(item, one.path, one.value)
            yield b"event: " + kind.encode() + b"\ndata: " + dumps(item) + b"\n\n"
        else:
            yield item


def _replace(event: Any, path: Sequence[str | int], value: Any) -> None:
    """Replace the field at `path`, if the event has it."""
    *folders, name = path
    try:
        for folder in folders:
            event = event[folder]
        if value is ABSENT:
            del event[name]
        elif event[name] is not ABSENT:
            event[name] = value
    except (KeyError, IndexError, TypeError):
        pass


def _items(request: Request, parts: Sequence[Part], reply_id: str) -> Iterator[dict[str, Any] | bytes | Accident]:
    """Yield the events of the reply, with the odd lines and accidents between them.

    Text on both sides of an accident stays one block, so that a `Stall` or `Drop` can hit a block in its middle.
    """
    usage = _usage(request, parts)
    yield _event("message_start", message=_message(request, reply_id, _counts(usage, 1)))
    yield _event("ping")
    index = -1
    current: Say | Think | Use | None = None

    def close() -> Iterator[dict[str, Any]]:
        if isinstance(current, Think):
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", index=index, delta=delta)
        if current is not None:
            yield _event("content_block_stop", index=index)

    for part in parts:
        match part:
            case Say() | Think() | Use():
                if isinstance(part, Use) or type(part) is not type(current):
                    yield from close()
                    index += 1
                    current = part
                    start = _block(part, f"toolu_{reply_id}_{index}")
                    yield _event("content_block_start", index=index, content_block=start)
                for delta in _deltas(part):
                    yield _event("content_block_delta", index=index, delta=delta)
                    if isinstance(part, Say) and part.pace:
                        yield Stall(part.pace)
            case Odd():
                yield ODD_LINES[part.name]
            case Usage() | Replace():
                pass
            case Refuse():
                yield _event("error", **{k: v for k, v in error(part, reply_id).items() if k != "type"})
                return
            case _:
                yield part
    yield from close()
    ending = {"stop_reason": _stop_reason(parts), "stop_sequence": None}
    yield _event("message_delta", delta=ending, usage=_counts(usage, usage.output))
    yield _event("message_stop")


def whole(request: Request, parts: Sequence[Part], reply_id: str) -> dict[str, Any]:
    """Return the reply as one message, for a client that does not stream."""
    usage = _usage(request, parts)
    content: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Say():
                content.append({"type": "text", "text": part.text})
            case Think():
                content.append({"type": "thinking", "thinking": part.text, "signature": SIGNATURE})
            case Use():
                use_id = f"toolu_{reply_id}_{len(content)}"
                content.append({"type": "tool_use", "id": use_id, "name": part.tool, "input": part.input})
            case _:
                pass
    message = _message(request, reply_id, _counts(usage, usage.output))
    return message | {"content": content, "stop_reason": _stop_reason(parts)}
