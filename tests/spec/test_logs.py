"""Logs: two formats, one redaction, no secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from hutch_shared.logs import redact, set_up_logs
from hutch_shared.secret import Secret


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the logging of before the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def written(stream: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_stream_gets_one_json_line_per_event() -> None:
    """Each line has time, level and logger."""
    stream = io.StringIO()
    set_up_logs(stream=stream)

    structlog.get_logger("hutch.test").info("started", port=5)

    [entry] = written(stream)
    assert (entry["event"], entry["level"], entry["logger"], entry["port"]) == ("started", "info", "hutch.test", 5)
    assert entry["timestamp"].endswith("Z")


def test_a_terminal_gets_text() -> None:
    """On a terminal the log is text, not JSON."""
    stream = Terminal()
    set_up_logs(stream=stream)

    structlog.get_logger().warning("low on space")

    assert "low on space" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_records_of_libraries_are_logged_alike() -> None:
    """A library's record is formatted with its arguments and redacted."""
    stream = io.StringIO()
    set_up_logs(stream=stream)

    logging.getLogger("a.library").warning("%d left, key %s", 3, "sk-ant-abcdefghijklmnop1234")

    [entry] = written(stream)
    assert entry["event"] == "3 left, key [redacted]"
    assert entry["logger"] == "a.library"


def test_records_below_the_level_are_not_written() -> None:
    """The level applies to Hutch's records and to those of libraries."""
    stream = io.StringIO()
    set_up_logs("warning", stream=stream)

    structlog.get_logger().info("no")
    logging.getLogger("x").info("no")

    assert stream.getvalue() == ""


def test_an_unknown_level_is_an_error_that_names_the_known() -> None:
    """`set_up_logs` raises ValueError with the known levels."""
    with pytest.raises(ValueError, match="debug"):
        set_up_logs("loud")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "text"])
def test_a_traceback_shows_no_secret(stream: io.StringIO) -> None:
    """The secret is neither in the message nor among the variables."""
    set_up_logs(stream=stream)
    try:
        key = "sk-ant-" + "q" * 30
        raise ValueError(f"bad key {key}")
    except ValueError:
        structlog.get_logger().exception("failed")

    assert "ValueError: bad key [redacted]" in stream.getvalue()
    assert "qqqq" not in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Secret("x"), "[redacted]"),
        ({"password": "x", "a": [{"api_key": "y"}]}, {"password": "[redacted]", "a": [{"api_key": "[redacted]"}]}),
        ({"Authorization": "x", "auth_token": b"y"}, {"Authorization": "[redacted]", "auth_token": "[redacted]"}),
        ({"accessToken": "x", "apiKey": "y"}, {"accessToken": "[redacted]", "apiKey": "[redacted]"}),
        ({"input_tokens": 5, "tokens": 7}, {"input_tokens": 5, "tokens": 7}),
        ("Bearer abcdefghijkl", "Bearer [redacted]"),
        ("https://me:pw@host/x", "https://[redacted]@host/x"),
        (b"sk-proj-0123456789abcdef", "[redacted]"),
        ("ask-me-anything, task-force-of-the-day", "ask-me-anything, task-force-of-the-day"),
        ({"session": "s-4k7q", "n": 1.5, "ok": None}, {"session": "s-4k7q", "n": 1.5, "ok": None}),
    ],
)
def test_secrets_are_known_by_type_by_name_and_by_form(value: Any, seen: Any) -> None:
    """Ordinary words and counts of tokens stay."""
    assert redact(value) == seen
