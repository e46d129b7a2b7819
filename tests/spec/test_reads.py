"""What an agent could have changed is read through `hutch_shared.tree` alone. All other reads are listed here.

An executor and hutchd run outside of the sandboxes. A file that they open by its whole path could be a link that an
agent put there, to what it cannot read itself.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEARCHED = ("executor/hutch_executor", "daemon/hutch_daemon", "shared/hutch_shared")
NAMES = {"open", "open_file"}
"""Functions that open a file."""
METHODS = {
    *("open", "fdopen", "read_text", "read_bytes", "readlink", "listdir", "scandir", "fwalk", "iterdir", "glob"),
    *("rglob", "iglob", "copyfile", "copy", "copy2", "copytree", "copyfileobj", "read_link"),
}
"""Methods and functions of modules that read files or folders."""

OWN = "a file in hutchd's own directories, which no sandbox shows"
PROC = "the kernel's files, which no account can change"
HOST = "a file of root's"
SPOOL = "the account's spool, which no sandbox shows; no link is followed"
NO_FILE = "no file: another thing is opened, or the descriptor came from a tree"
READS: dict[str, tuple[int, str]] = {
    "shared/hutch_shared/tree.py": (10, "the one way: by descriptors, without following a link"),
    "shared/hutch_shared/removal.py": (
        4,
        "removes by descriptors, without following a link, and gives no content away",
    ),
    "shared/hutch_shared/failpoints.py": (1, "a file of the tests, appended to"),
    "shared/hutch_shared/host_mark.py": (5, HOST),
    "shared/hutch_shared/hutchd_lock.py": (3, OWN),
    "shared/hutch_shared/process_record.py": (1, OWN),
    "shared/hutch_shared/processes.py": (4, PROC),
    "shared/hutch_shared/reach.py": (1, "the doctor's advice about paths; gives no content away"),
    "shared/hutch_shared/unix.py": (1, OWN),
    "executor/hutch_executor/account/commands.py": (1, "/dev/null"),
    "executor/hutch_executor/events/orphan_spool.py": (1, SPOOL),
    "executor/hutch_executor/events/spool.py": (3, SPOOL),
    "executor/hutch_executor/events/spool_files.py": (4, SPOOL),
    "executor/hutch_executor/process/cgroups.py": (4, PROC),
    "executor/hutch_executor/process/children.py": (2, PROC),
    "executor/hutch_executor/process/hardening.py": (2, PROC),
    "executor/hutch_executor/process/memory.py": (1, PROC),
    "executor/hutch_executor/process/reaper.py": (2, NO_FILE),
    "executor/hutch_executor/runners/claude/config_dir.py": (1, NO_FILE),
    "executor/hutch_executor/runners/claude/message_socket.py": (5, PROC),
    "executor/hutch_executor/runners/claude/spawn.py": (2, PROC),
    "executor/hutch_executor/runners/script.py": (1, "the script that the user named, which is played and never shown"),
    "executor/hutch_executor/sandbox/confine.py": (1, PROC),
    "executor/hutch_executor/sandbox/landlock.py": (2, "places that an agent cannot change, without following a link"),
    "executor/hutch_executor/sandbox/places.py": (1, "names of settings files in the home; gives no content away"),
    "executor/hutch_executor/sandbox/plan.py": (1, "the text of a link, which the sandbox repeats"),
    "executor/hutch_executor/sandbox/private_home.py": (1, "opens folders, without following a link"),
    "executor/hutch_executor/sandbox/supervisor.py": (13, "holds what an agent names; gives no content away"),
    "executor/hutch_executor/sandbox/workspace.py": (2, "names in the temporary folder, without following a link"),
    "executor/hutch_executor/worker.py": (1, NO_FILE),
    "daemon/hutch_daemon/doctor/accounts.py": (3, HOST),
    "daemon/hutch_daemon/doctor/launcher.py": (1, HOST),
    "daemon/hutch_daemon/doctor/record.py": (3, OWN),
    "daemon/hutch_daemon/doctor/sudo.py": (2, HOST),
    "daemon/hutch_daemon/environments/cgroups.py": (3, PROC),
    "daemon/hutch_daemon/environments/handover.py": (1, PROC),
    "daemon/hutch_daemon/environments/kernel_limits.py": (5, PROC),
    "daemon/hutch_daemon/environments/local.py": (3, OWN),
    "daemon/hutch_daemon/environments/processes.py": (2, PROC),
    "daemon/hutch_daemon/environments/user_namespaces.py": (1, PROC),
    "daemon/hutch_daemon/keys/durable.py": (5, OWN),
    "daemon/hutch_daemon/keys/master.py": (2, OWN),
    "daemon/hutch_daemon/keys/oauth.py": (1, NO_FILE),
    "daemon/hutch_daemon/keys/supervisor.py": (1, OWN),
    "daemon/hutch_daemon/pool/adoption.py": (1, OWN),
    "daemon/hutch_daemon/pool/made_of.py": (2, "Hutch's own program files"),
    "daemon/hutch_daemon/services/forks.py": (1, NO_FILE),
    "daemon/hutch_daemon/services/policy_layers.py": (1, "the host's policy file, which its settings name"),
    "daemon/hutch_daemon/services/session_executors.py": (1, NO_FILE),
    "daemon/hutch_daemon/settings.py": (1, "hutchd's settings file"),
    "daemon/hutch_daemon/store/backups.py": (2, OWN),
    "daemon/hutch_daemon/store/database.py": (4, OWN),
    "daemon/hutch_daemon/store/lock.py": (1, OWN),
    "daemon/hutch_daemon/store/reserve.py": (1, OWN),
    "daemon/hutch_daemon/wiring/__init__.py": (3, NO_FILE),
}
"""For each module the number of its reads, and why none of them is of a file that an agent could have changed."""


def reads_of(path: Path) -> list[int]:
    """Return the lines of the calls in a module that may read a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name) if name in NAMES:
                found.append(node.lineno)
            case ast.Attribute(attr=name) if name in METHODS:
                found.append(node.lineno)
    return found


def test_every_read_is_through_a_tree_or_has_a_reason() -> None:
    """A new read belongs into `Tree`, or into the list with its reason; a removed one leaves the list."""
    modules = [path for folder in SEARCHED for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): reads_of(path) for path in modules}
    counts = Counter({name: len(lines) for name, lines in found.items() if lines})
    listed = Counter({name: count for name, (count, _) in READS.items()})

    assert {name: found[name] for name in counts if counts[name] != listed[name]} == {}
    assert {name for name in listed if not counts[name]} == set()
    assert all(reason for _, reason in READS.values())


def test_the_search_finds_reads(tmp_path: Path) -> None:
    """Each of these lines reads a file."""
    lines = [
        "open(p)",
        "os.open(p, 0)",
        "Path(p).read_text()",
        "path.open('rb')",
        "os.scandir(p)",
        "x = p.read_bytes()",
    ]
    (tmp_path / "x.py").write_text("\n".join(lines))

    assert reads_of(tmp_path / "x.py") == [1, 2, 3, 4, 5, 6]
