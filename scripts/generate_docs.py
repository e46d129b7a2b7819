"""Writes the pages of docs/ that follow from tables in the code; with `--check` only tells whether they are current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hutch_daemon.api.gate import CLIENT_GATE, EXECUTOR_GATE, About, Row, Standing, Who
from hutch_daemon.machine import mermaid
from hutch_daemon.pool import states as pool_states
from hutch_daemon.services.states import PERMISSION, SESSION, TURN
from hutch_shared.errors import Reason
from hutch_shared.events import DATA_OF_KIND
from hutch_shared.messages import PROTOCOL
from hutch_shared.methods import CLIENT, EXECUTOR, TO_CLIENT, TO_EXECUTOR, Table
from hutch_shared.rpc.conversation import PENDING
from hutch_shared.rpc.envelope import BATCH_LIMIT, DEPTH_LIMIT, DIGITS_LIMIT

ROOT = Path(__file__).resolve().parent.parent

INTRODUCTION = f"""# The protocol

This page is generated from `hutch_shared.methods`, `messages`, `events`, `errors` and `hutch_daemon.api.gate` by
`scripts/generate_docs.py`.

Protocol {PROTOCOL}. JSON-RPC 2.0, one JSON object (or batch) per line, UTF-8, lines split on the byte `\\n` alone;
both sides ask and answer on one connection.

- Ids are strings, or integers within ±2^53. An id that is in flight is not taken again: that is refused without an id.
- At most {PENDING} requests are in flight in each direction; one more is `overloaded`.
- A batch has 1 to {BATCH_LIMIT} members. Each stands for itself; the answers come together when the last is there.
- Parameters come by name (an object) or by position (an array, in the order below). Fields that a side does not know
  are ignored; members of the envelope that JSON-RPC does not know are refused.
- Nesting is at most {DEPTH_LIMIT} levels deep, an integer has at most {DIGITS_LIMIT} digits, a float is finite; no NaN,
  no lone surrogates. No key is there twice in the envelope or, where *strict* is said, in the parameters.
- A frame over the socket's limit is answered `frame_too_large`, and its line is skipped. A first message that is no
  JSON is answered `parse_error` and the connection closed; so is one, without a word, on which none came in time.
- A notification is never answered. Notifications of one connection are taken in the order they were sent.
- Times are RFC 3339 in UTC, durations seconds, money US dollars. A field that holds its default may be left out.
"""

TABLES: tuple[tuple[str, Table], ...] = (
    ("Client → hutchd (`client.sock`)", CLIENT),
    ("hutchd → client", TO_CLIENT),
    ("Executor → hutchd (`executor.sock`)", EXECUTOR),
    ("hutchd → executor", TO_EXECUTOR),
)


def protocol() -> str:
    """Return docs/protocol.md."""
    parts = [INTRODUCTION]
    for title, table in TABLES:
        parts.append(f"## {title}\n")
        parts.append("| method | takes | gives | |\n|---|---|---|---|")
        parts += [_row(row) for row in table.values()]
        parts.append("\n*n*: a notification. *c*: changes state. *s*: strict.\n")
    parts += _gate()
    parts.append("## Events\n")
    parts.append("`data` of each kind of event:\n\n| kind | data |\n|---|---|")
    parts += [f"| `{kind}` | {_link(data)} |" for kind, data in DATA_OF_KIND.items()]
    parts.append("\n## Errors\n")
    parts.append("`error.data.reason` is the word; `error.message` is a sentence for the reader.\n")
    parts.append("| code | reason | says |\n|---|---|---|")
    parts += [f"| {reason.code} | `{reason.word}` | {reason.sentence} |" for reason in Reason]
    parts.append("\n## Types\n")
    for kind in sorted(_reachable(), key=lambda kind: kind.__name__):
        parts += _type(kind)
    return "\n".join(parts).rstrip() + "\n"


GATE = """## Who may call what

What is not in these tables is refused. They are those of the code (`hutch_daemon.api.gate`), and a test calls every
method in every role about everything in every state to see that it is so.

Who calls is known by the kernel's word. *insider*: a process of a session, whatever its account is; it changes nothing,
and has no rights of an administrator. *operators*: uid 0, the administrators that the settings name, and hutchd's own
account; the last one sees no more than a person. *people*: all but insiders. To everybody but uid 0 and administrators
a thing of another's looks like one that does not exist, word for word. Keys, rules and trust are personal: also an
administrator has only the own ones.
"""
_WHO = {Who.EVERYBODY: "everybody", Who.PEOPLE: "people", Who.OPERATORS: "operators"}


def _gate() -> Iterator[str]:
    yield GATE
    yield "| method of clients | for | is about | not the caller's | session open | closed | hutchd drains |"
    yield "|---|---|---|---|---|---|---|"
    for method, row in CLIENT_GATE.items():
        about = "; ".join(one.value.partition(",")[0].partition(":")[0] for one in row.about)
        yield f"| `{method}` | {_WHO[row.who]} | {about} | {' | '.join(_answers(row))} |"
    yield "\nAn open session is one at work: a turn runs, another waits, a question is asked. Empty: it is done.\n"
    yield f"| method of executors | {' | '.join(one.value for one in Standing)} |"
    yield f"|---{'|---' * len(Standing)}|"
    for method, answers in EXECUTOR_GATE.items():
        yield f"| `{method}` | {' | '.join(_word(one) for one in answers)} |"
    yield "\nA notification that is refused has no answer: it ends the connection.\n"


def _answers(row: Row) -> Iterator[str]:
    named = not {About.NOTHING, About.OWN, About.SEEN}.issuperset(row.about)
    yield (_word(row.absent) or "nothing is shown") if named else ""
    yield _word(row.open)
    yield _word(row.closed)
    yield "" if row.draining else "`shutting_down`"


def _word(reason: Reason | None) -> str:
    return "" if reason is None else f"`{reason.word}`"


def _row(row: Any) -> str:
    marks = "".join(mark for mark, on in (("n", not row.result), ("c", row.changes), ("s", row.control)) if on)
    gives = _link(row.result) if row.result else ""
    return f"| `{row.name}` | {_link(row.params)} | {gives} | {row.doc} {f'*{marks}*' if marks else ''} |"


def _link(kind: type[msgspec.Struct]) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _type(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield f"### {kind.__name__}\n"
    doc = kind.__dict__.get("__doc__")
    if doc:
        yield " ".join(doc.split()) + "\n"
    fields = msgspec.structs.fields(kind)
    if not fields:
        yield "No fields.\n"
        return
    yield "| field | type | |\n|---|---|---|"
    for field in fields:
        default = "required" if field.required else _default(field)
        yield f"| `{field.encode_name}` | {_spell(field.type)} | {default} |"
    yield ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "" if value is None or value is msgspec.UNSET else f"default `{msgspec.json.encode(value).decode()}`"


def _spell(kind: Any) -> str:
    """Write a type as a reader of JSON knows it."""
    return _spell_info(msgspec.inspect.type_info(kind))


_PLAIN = {
    "StrType": "string",
    "IntType": "integer",
    "FloatType": "number",
    "BoolType": "true or false",
    "NoneType": "null",
    "AnyType": "any",
    "RawType": "any",
}


def _spell_info(info: Any) -> str:
    name = type(info).__name__
    if name in _PLAIN:
        return _PLAIN[name]
    match info:
        case msgspec.inspect.StructType():
            return _link(info.cls)
        case msgspec.inspect.LiteralType():
            return " ".join(f"`{value}`" for value in info.values)
        case msgspec.inspect.UnionType():
            return " or ".join(dict.fromkeys(_spell_info(one) for one in info.types))
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType() | msgspec.inspect.SetType():
            return f"array of {_spell_info(info.item_type)}"
        case msgspec.inspect.TupleType():
            return f"array: {', '.join(map(_spell_info, info.item_types))}"
        case msgspec.inspect.DictType():
            return f"object of {_spell_info(info.value_type)}"
        case _:
            raise TypeError(f"no word for {info}")


def _reachable() -> set[type[msgspec.Struct]]:
    """Return every type that is on the wire."""
    found: set[type[msgspec.Struct]] = set()

    def visit(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls not in found:
                found.add(info.cls)
                for field in info.fields:
                    visit(field.type)
            return
        for part in ("types", "item_types"):
            for one in getattr(info, part, ()):
                visit(one)
        for part in ("item_type", "value_type"):
            if hasattr(info, part):
                visit(getattr(info, part))

    kinds = [kind for _, table in TABLES for row in table.values() for kind in (row.params, row.result) if kind]
    for kind in (*kinds, *DATA_OF_KIND.values()):
        visit(msgspec.inspect.type_info(kind))
    return found


STATES = """# States

This page is drawn from the tables in the code (`services/states.py`, `pool/states.py`) by `scripts/generate_docs.py`.

A move that is not drawn raises. A terminal state never changes: moves are compare-and-set in the store, so the first
writer wins. That a turn waits for an answer is no state: it is running, and at least one question of it is pending.
"""


def states() -> str:
    """Return docs/states.md."""
    drawn = {
        SESSION.name: mermaid(SESSION),
        TURN.name: mermaid(TURN),
        pool_states.EXECUTOR.name: mermaid(pool_states.EXECUTOR),
        PERMISSION.name: mermaid(PERMISSION),
    }
    drawings = "\n\n".join(f"## {name}\n\n```mermaid\n{text}\n```" for name, text in drawn.items())
    return f"{STATES}\n{drawings}\n"


PAGES = {"docs/protocol.md": protocol, "docs/states.md": states}
"""Each page that is generated, and by what."""


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` compare them. Exit status 1: a page is not current."""
    if arguments not in ([], ["--check"]):
        print("usage: generate_docs.py [--check]", file=sys.stderr)
        return 2
    stale = 0
    for name, page in PAGES.items():
        path = ROOT / name
        text = page()
        if path.exists() and path.read_text() == text:
            continue
        if arguments:
            print(f"{name} is not current: run scripts/generate_docs.py", file=sys.stderr)
            stale = 1
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
