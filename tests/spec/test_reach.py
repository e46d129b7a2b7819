from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hutch_shared.reach import PathReader, closed, members

STRANGER = PathReader("ann", 54321, 54321, frozenset({54321, 54322}), "/home/ann", "/bin/sh")


@pytest.fixture
def tree() -> Iterator[Path]:
    """Yield a folder with `b/file` that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="hutch-reach-") as folder:
        top = Path(folder)
        (top / "a/b").mkdir(parents=True)
        (top / "a/b/file").write_text("")
        for path in (top, top / "a", top / "a/b", top / "a/b/file"):
            path.chmod(0o755)
        yield top / "a"


def test_the_first_closed_component_is_named(tree: Path) -> None:
    """Of several closed components, the one nearest to the root is named, with its mode and owner."""
    (tree / "b/file").chmod(0o600)
    last = closed(tree / "b/file", STRANGER)
    tree.chmod(0o750)
    first = closed(tree / "b/file", STRANGER)

    assert last is not None
    assert last.startswith(f"{tree}/b/file is closed to it (-rw------- ")
    assert first is not None
    assert first.startswith(f"{tree} is closed to it (drwxr-x--- ")


def test_owner_group_or_others_decide_in_this_order(tree: Path) -> None:
    """As in the kernel, an owner without rights does not get those of the others."""
    file = tree / "b/file"
    found = file.stat()
    owner = replace(STRANGER, uid=found.st_uid or 1)
    mate = replace(STRANGER, gids=frozenset({found.st_gid}))
    file.chmod(0o044)

    assert closed(file, STRANGER) is None
    assert closed(file, mate) is None
    assert closed(file, STRANGER, 1) is not None
    assert closed(file, replace(STRANGER, uid=0), 1) is None
    if found.st_uid:
        assert closed(file, owner) is not None
    file.chmod(0o604)
    assert closed(file, mate) is not None


def test_links_are_followed(tree: Path) -> None:
    """A link does not open a closed target, and a loop of links is reported."""
    (tree / "open").mkdir(mode=0o755)
    (tree / "open/link").symlink_to("../b/file")
    (tree / "open/round").symlink_to("round")
    way = closed(tree / "open/link", STRANGER)
    (tree / "b").chmod(0o700)

    assert way is None
    assert (closed(tree / "open/link", STRANGER) or "").startswith(f"{tree}/b is closed to it")
    assert closed(tree / "open/round", STRANGER) == f"{tree}/open/round leads through too many links"
    assert closed(tree / "open/nothing", STRANGER) == f"{tree}/open/nothing does not exist"


def test_accounts_have_all_their_groups() -> None:
    """The primary group counts: an account has it, and it has members."""
    me = PathReader.named("root")

    assert (me.uid, me.gid in me.gids) == (0, True)
    assert "root" in members("root") or members("wheel")
    with pytest.raises(KeyError):
        PathReader.named("nobody-of-this-name")
