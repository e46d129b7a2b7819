"""Logs to standard error, without secrets: JSON lines, or colour on a terminal.

Records of the standard `logging`, from libraries and from Hutch, pass through the same redaction.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TextIO

import msgspec
import structlog

from hutch_shared.secret import Secret

__all__ = ["LEVELS", "mask_also", "redact", "redact_text", "set_up_logs"]

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_HIDDEN: Final = "[redacted]"
_SECRET_NAME: Final = re.compile(
    r"(?i)pass(?:word|wd|phrase)|secret|token|credential|authorization|cookie|(?:api|master|private|access)[_-]?key"
)
_SECRET_TEXT: Final = re.compile(
    r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"
    r"|(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[0-9A-Z]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
    r"|(?i:(?<=bearer )[A-Za-z0-9._~+/=-]{8,})"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def redact_text(text: str) -> str:
    """Return `text` with keys, tokens and passwords in URLs replaced, if their form reveals them."""
    for mask in _also:
        text = mask(text)
    return _SECRET_TEXT.sub(_HIDDEN, text)


_also: list[Callable[[str], str]] = []


def mask_also(mask: Callable[[str], str]) -> None:
    """Apply `mask`, which replaces the secrets that it knows, to every logged text from now on."""
    _also.append(mask)


def redact(value: Any) -> Any:
    """Return `value` with every `Secret` and every value under a secret-sounding key replaced, at any depth."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Secret):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {key: _HIDDEN if _is_secret(key, part) else redact(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact_text(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))


def _is_secret(key: Any, value: Any) -> bool:
    """Return whether `value` is a secret by its key. A number is not a secret: `tokens` may be a count."""
    return isinstance(key, str) and not isinstance(value, int | float) and bool(_SECRET_NAME.search(key))


def _redact_event(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    redacted: Mapping[str, Any] = redact(event)
    return redacted


def _to_json(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    return msgspec.json.encode(event).decode()


def set_up_logs(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Log to `stream` (standard error) from `level` on; JSON lines, or colour if it is a terminal.

    ValueError for an unknown level. A further call changes the level.
    """
    if level not in LEVELS:
        raise ValueError(f"no log level {level!r}; there are {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    terminal = stream.isatty()
    before: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
    ]
    last: list[Any] = (
        [_redact_traceback, _redact_event, structlog.dev.ConsoleRenderer(colors=True)]
        if terminal
        else [_redact_traceback, _redact_event, _to_json]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)


def _redact_traceback(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Format the exception as text before redaction, without local variables."""
    formatted: MutableMapping[str, Any] = structlog.processors.format_exc_info(logger, method, event)
    return formatted
