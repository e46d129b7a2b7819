"""Write the pages of docs/ that come from tables in the code; with `--check`, only verify that they are current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hutch_daemon.api.gate import CLIENT_GATE, EXECUTOR_GATE, CallerClass, GateRow, LeaseStanding, Subject, callers_of
from hutch_daemon.machine import mermaid
from hutch_daemon.pool import states as pool_states
from hutch_daemon.services.states import PERMISSION, SESSION, TURN
from hutch_shared.attacks import ATTACKS, Cell
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

Protocol {PROTOCOL}. JSON-RPC 2.0, one JSON object (or batch) per line, UTF-8, lines split on the byte `\\n` alone.
Both sides make requests on one connection.

- Ids are strings, or integers within ±2^53. A request whose id is in flight already is refused, without an id.
- At most {PENDING} requests are in flight in each direction; a further one gets `overloaded`.
- A batch has 1 to {BATCH_LIMIT} independent members; their answers are sent together when the last is ready.
- Parameters are named (an object) or positional (an array, in the order below). Unknown fields are ignored; unknown
  members of the envelope are refused.
- Nesting is at most {DEPTH_LIMIT} levels deep, an integer has at most {DIGITS_LIMIT} digits, a float is finite; no NaN,
  no lone surrogates. The envelope has no duplicate keys, nor do the parameters of a *strict* method.
- A frame over the socket's limit gets `frame_too_large`, and the rest of its line is skipped. A first message that is
  not JSON gets `parse_error`, and the connection is closed. If no first message arrives in time, it is closed silently.
- A notification is never answered. Notifications of one connection are handled in the order of sending.
- Times are RFC 3339 in UTC, durations seconds, money US dollars. A field with its default value may be omitted.
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

These are the tables of `hutch_daemon.api.gate`. A method that they do not name is refused. A test calls every method as
every class of caller, about every subject in every state, and compares the answer with the table.

The kernel identifies the caller. *insider*: a process of a session, under any account; it changes nothing and has no
administrator's rights. *operators*: uid 0, the administrators that the settings name, and hutchd's own account, which
sees only its own records. *people*: every caller but insiders. Only uid 0 and administrators see records of other
owners; for all others they do not exist, with the same answer word for word. Keys, rules and trust are personal, also
for administrators.
"""
_WHO = {CallerClass.EVERYBODY: "everybody", CallerClass.PEOPLE: "people", CallerClass.OPERATORS: "operators"}


def _gate() -> Iterator[str]:
    yield GATE
    yield "| method of clients | for | subject | not the caller's | session open | session closed | hutchd drains |"
    yield "|---|---|---|---|---|---|---|"
    for method, row in CLIENT_GATE.items():
        about = "; ".join(one.value.partition(",")[0].partition(":")[0] for one in row.about)
        yield f"| `{method}` | {_WHO[callers_of(method)]} | {about} | {' | '.join(_answers(row))} |"
    yield "\n*Session open*: with a running turn, a queued turn and a pending permission request. Empty: allowed.\n"
    yield f"| method of executors | {' | '.join(one.value for one in LeaseStanding)} |"
    yield f"|---{'|---' * len(LeaseStanding)}|"
    for method, answers in EXECUTOR_GATE.items():
        yield f"| `{method}` | {' | '.join(_word(one) for one in answers)} |"
    yield "\nA refused notification ends the connection, since it has no answer.\n"


def _answers(row: GateRow) -> Iterator[str]:
    named = not {Subject.NOTHING, Subject.OWN, Subject.SEEN}.issuperset(row.about)
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
    """Return the type in the terms of JSON."""
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
            raise TypeError(f"no JSON term for {info}")


def _reachable() -> set[type[msgspec.Struct]]:
    """Return every type of the wire."""
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

`scripts/generate_docs.py` draws this page from the tables in `services/states.py` and `pool/states.py`.

A transition that is not drawn raises. Transitions are compare-and-set in the store, so the first writer wins and a
terminal state never changes. `awaiting_permission` is derived and not stored: readers see a
running turn with a pending permission request in this state.
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


ATTACK_TABLE = (
    "| an agent's command can | bubblewrap: own account | another account | Landlock: own account | another account"
    " | neither: own account | another account | why |\n|---|---|---|---|---|---|---|---|"
)
BEGIN, END = "<!-- generated: attacks -->\n", "<!-- end -->"


def security() -> str:
    """Return docs/security.md with the current table of attacks; the rest of the page is written by hand."""
    before, rest = (ROOT / "docs/security.md").read_text().split(BEGIN)
    rows = []
    for one in ATTACKS:
        cells = (_spell_cell(cell) for cell in (*one.bubblewrap, *one.landlock, *one.none))
        rows.append(f"| `{one.name}`: {one.does} | {' | '.join(cells)} | {one.why} |")
    table = "\n".join((ATTACK_TABLE, *rows))
    return f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}"


def _spell_cell(cell: Cell) -> str:
    return "closed" if cell.openness == "closed" else f"**{cell}**"


PAGES = {"docs/protocol.md": protocol, "docs/states.md": states, "docs/security.md": security}
"""Each generated page and its function."""


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them with `--check`. Exit code 1: a page is not current."""
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
