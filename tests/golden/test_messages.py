"""Every message has a golden JSON document, so that a change of the wire changes a file.

`python -m tests.golden.test_messages` rewrites the documents. A change needs a decision record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden.examples import example, wire_types

FILES = Path(__file__).parent / "messages"


def document(kind: type[msgspec.Struct]) -> bytes:
    """Return the JSON of the type's example, indented for people."""
    return msgspec.json.format(msgspec.json.encode(example(kind)), indent=2) + b"\n"


@pytest.mark.parametrize("kind", wire_types(), ids=lambda kind: kind.__name__)
def test_a_message_is_as_it_was_written_down(kind: type[msgspec.Struct]) -> None:
    """The example of each type encodes to its golden document."""
    golden = (FILES / f"{kind.__name__}.json").read_bytes()

    assert document(kind) == golden


@pytest.mark.parametrize("kind", wire_types(), ids=lambda kind: kind.__name__)
def test_a_golden_document_decodes_to_the_same_value(kind: type[msgspec.Struct]) -> None:
    """A golden document decodes to its example; unknown fields are ignored."""
    golden: dict[str, Any] = msgspec.json.decode((FILES / f"{kind.__name__}.json").read_bytes())

    decoded = msgspec.json.decode(msgspec.json.encode({**golden, "a_field_of_tomorrow": [1]}), type=kind)

    assert msgspec.json.encode(decoded) == msgspec.json.encode(example(kind))


def test_there_is_no_golden_document_without_a_message() -> None:
    """A removed message has no golden document."""
    assert {path.stem for path in FILES.glob("*.json")} == {kind.__name__ for kind in wire_types()}


def write() -> None:
    """Write all documents."""
    FILES.mkdir(exist_ok=True)
    for path in FILES.glob("*.json"):
        path.unlink()
    for kind in wire_types():
        (FILES / f"{kind.__name__}.json").write_bytes(document(kind))


if __name__ == "__main__":
    write()
