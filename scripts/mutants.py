"""Plant small faults in the code, one at a time, and report which of them the tests notice.

A mutant changes one comparison, boolean operator, condition, constant or return value. It is killed when a test of its
area fails or runs into the time limit. The same seed chooses the same mutants of the same code.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

TOP: Final = Path(__file__).resolve().parent.parent
SLOWER: Final = 5.0
"""A mutant is killed when its tests take this many times as long as without it, and at least 30 s longer."""
UNFIT: Final = "not fuzz and not differential"
"""Random tests would kill a mutant by chance, and take too long."""

DAEMON, TESTS = "daemon/hutch_daemon/", "tests/daemon/"
AREAS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "gate": ((DAEMON + "api/gate.py",), (TESTS + "api",)),
    "policy": (
        (
            *(
                f"{DAEMON}permissions/{name}.py"
                for name in ("policy", "forbidding", "allowing", "rules", "layers", "paths")
            ),
            DAEMON + "permissions/shell/*.py",
        ),
        (TESTS + "permissions", TESTS + "policy_cases"),
    ),
    "store": ((DAEMON + "store/*.py",), (TESTS + "store", TESTS + "events")),
    "approvals": (
        tuple(f"{DAEMON}permissions/{name}.py" for name in ("approvals", "requests", "transactions", "pending")),
        (TESTS + "approvals", TESTS + "services/test_bad_disk.py"),
    ),
    "reporter": (
        ("executor/hutch_executor/events/*.py",),
        tuple(f"tests/executor/test_{name}.py" for name in ("reporter", "outbox", "spool", "orphan_spool")),
    ),
    "launcher": (
        ("daemon/hutch_launcher/rules.py", "daemon/hutch_launcher/packets.py"),
        ("tests/launcher/test_rules.py", "tests/launcher/test_start.py", "tests/launcher/test_messages.py"),
    ),
    "broker": (("daemon/hutch_broker/*.py",), ("tests/broker",)),
}
"""By area: the files to change, and the tests that must notice."""

_COMPARE: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


class Mutant(NamedTuple):
    """One replacement in one file; `start` and `end` are offsets in its bytes."""

    path: str
    line: int
    start: int
    end: int
    new: str


def main() -> int:
    """Run the sample; return 0 whatever was killed, 2 for wrong arguments or a tree with changes."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, default=60, help="the number of mutants, shared among the areas (60)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--area", choices=AREAS, action="append", help="only this area; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    options = parser.parse_args()
    areas = options.area or list(AREAS)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=TOP, check=False).returncode
    if changed and not options.list:
        print("mutants: commit or stash your changes first", file=sys.stderr)
        return 2
    chance = random.Random(options.seed)
    killed = run = 0
    for number, area in enumerate(areas):
        share = options.sample // len(areas) + (number < options.sample % len(areas))
        mutants = list(_mutants(area))
        chosen = chance.sample(mutants, min(share, len(mutants)))
        caught = 0
        limit = 0.0
        if not options.list:
            began = time.monotonic()
            if not _pass(AREAS[area][1], 1800.0):
                print(f"mutants: the tests of {area} fail without a mutant", file=sys.stderr)
                return 2
            limit = 30.0 + SLOWER * (time.monotonic() - began)
        for mutant in chosen:
            if options.list:
                print(json.dumps(_row(area, mutant)))
                continue
            began = time.monotonic()
            outcome = _try(mutant, AREAS[area][1], limit)
            caught += outcome != "survived"
            print(
                json.dumps({**_row(area, mutant), "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}),
                flush=True,
            )
        if not options.list:
            print(json.dumps({"area": area, "mutants": len(chosen), "killed": caught, "of": len(mutants)}), flush=True)
            killed, run = killed + caught, run + len(chosen)
    if not options.list:
        print(json.dumps({"seed": options.seed, "mutants": run, "killed": killed}))
    return 0


def _row(area: str, mutant: Mutant) -> dict[str, object]:
    was = (TOP / mutant.path).read_bytes()[mutant.start : mutant.end].decode()
    return {"area": area, "file": mutant.path, "line": mutant.line, "was": was, "now": mutant.new}


def _try(mutant: Mutant, tests: tuple[str, ...], limit: float) -> str:
    """Run the tests on the changed file and restore it; return `killed`, `timeout` or `survived`."""
    path = TOP / mutant.path
    before = path.read_bytes()
    path.write_bytes(before[: mutant.start] + mutant.new.encode() + before[mutant.end :])
    try:
        return "survived" if _pass(tests, limit) else "killed"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_bytes(before)


def _pass(tests: tuple[str, ...], limit: float) -> bool:
    """Run tests for at most `limit` seconds and tell whether they pass. subprocess.TimeoutExpired."""
    existing = [test for test in tests if (TOP / test).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full", "-k", UNFIT]
    return (
        subprocess.run([*command, *existing], cwd=TOP, capture_output=True, timeout=limit, check=False).returncode == 0
    )


def _mutants(area: str) -> Iterator[Mutant]:
    for pattern in AREAS[area][0]:
        for path in sorted(TOP.glob(pattern)):
            source = path.read_text()
            lines = [0]
            for line in source.encode().splitlines(keepends=True):
                lines.append(lines[-1] + len(line))
            for node in ast.walk(ast.parse(source)):
                for start, end, new in _changes(node, source.encode(), lines):
                    yield Mutant(str(path.relative_to(TOP)), node.lineno, start, end, new)  # type: ignore[attr-defined]


def _changes(node: ast.AST, source: bytes, lines: list[int]) -> Iterator[tuple[int, int, str]]:
    def begin(part: ast.expr) -> int:
        return lines[part.lineno - 1] + part.col_offset

    def end(part: ast.expr) -> int:
        assert part.end_lineno is not None
        assert part.end_col_offset is not None
        return lines[part.end_lineno - 1] + part.end_col_offset

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            if source[end(left) : begin(right)].count(b"\n") == 0:
                between = source[end(left) : begin(right)].decode()
                tail = between[len(between.rstrip("(")) :]
                yield end(left), begin(right), f" {_COMPARE[type(op)]} {tail}"
        case ast.BoolOp(op=op, values=[first, second, *_]):
            joint = source[end(first) : begin(second)]
            old, new = (b"and", b"or") if isinstance(op, ast.And) else (b"or", b"and")
            if joint.count(old) == 1:
                yield end(first), begin(second), joint.replace(old, new).decode()
        case ast.If(test=test) | ast.IfExp(test=test):
            text = source[begin(test) : end(test)].decode()
            if ":=" not in text:
                yield begin(test), end(test), f"(not ({text}))"
        case ast.Return(value=ast.Constant(value=bool(value)) as part):
            yield begin(part), end(part), str(not value)
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value not in (0, 1):
            yield begin(node), end(node), str(value + 1)


if __name__ == "__main__":
    sys.exit(main())
