"""Whole scripts, each a pure function of the conversation, and the repository of `demo`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.rehearsal.parts import Reply, Request, Say, Script, Think, Use

BUG = "return sum(prices) - percent"
FIX = "return round(sum(prices) * (100 - percent) / 100)"
RUN_TEST = "python3 -B -m unittest"
DEMO_FILES = {
    "till.py": f'''"""What a customer pays."""


def total(prices: list[int], percent: int = 0) -> int:
    """The sum of the prices in cents, less a discount, rounded to whole cents."""
    {BUG}
''',
    "test_till.py": """import unittest

from till import total


class TotalTest(unittest.TestCase):
    def test_no_discount_changes_nothing(self) -> None:
        self.assertEqual(total([250, 199]), 449)

    def test_a_discount_is_a_share_of_the_sum(self) -> None:
        self.assertEqual(total([1000, 1000], percent=25), 1500)


if __name__ == "__main__":
    unittest.main()
""",
}


def write_demo_repository(folder: Path) -> None:
    """Make `folder` a git repository of one commit, in which one of two tests fails."""
    for name, text in DEMO_FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    who = ["-c", "user.name=Demo", "-c", "user.email=demo@localhost", "-c", "commit.gpgsign=false"]
    for step in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "A till"]):
        subprocess.run(["git", *step], cwd=folder, check=True)


def demo(request: Request) -> Reply:
    """An agent that makes the failing test pass: looks around, reads, edits, runs the test, and reports the outcome.

    It follows the results of its tools: it reports an edit that was denied, or a test that still fails.
    """
    tools = {r.call.tool for r in request.fresh if r.call}
    if failed := [r.text for r in request.fresh if r.is_error]:
        return Say(f"I stop here: that did not work.\n\n{failed[0][:500]}", chunks=4)
    if not tools:
        return [
            Think("A test fails. First see what is here."),
            Say("I look at what is here, and where I run.", chunks=6),
            Use("Bash", {"command": "git ls-files", "description": "List the files"}),
            Use("Bash", {"command": "env", "description": "Show the environment"}),
        ]
    if "Edit" in tools:
        return [
            Say("Now the tests.", chunks=3),
            Use("Bash", {"command": RUN_TEST, "description": "Run the tests"}),
        ]
    if "Read" in tools:
        for result in request.fresh:
            if result.call and BUG in result.text:
                change = {"file_path": result.call.input["file_path"], "old_string": BUG, "new_string": FIX}
                return [
                    Say("`total` takes the discount off in cents. It should be a share of the sum.", chunks=12),
                    Use("Edit", change),
                ]
        return Say("I read the files and found nothing to change.", chunks=4)
    by_command = {r.call.input.get("command"): r.text for r in request.fresh if r.call}
    if listed := by_command.get("git ls-files"):
        sources = [name for name in listed.split() if name.endswith(".py")]
        return [Say("I read them."), *(Use("Read", {"file_path": f"{request.cwd}/{name}"}) for name in sources)]
    if "OK" in by_command.get(RUN_TEST, "").split():
        return Say("Done: the discount is a share of the sum now, and all tests pass.", chunks=10)
    return Say(f"The tests do not pass yet.\n\n{by_command.get(RUN_TEST, '')[-500:]}", chunks=4)


def echo(request: Request) -> Reply:
    """Repeat the last message, a word at a time."""
    return Say(request.prompt, chunks=len(request.prompt.split()))


SCRIPTS: dict[str, Script] = {"demo": demo, "echo": echo}
