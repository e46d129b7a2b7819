"""Reading below a directory whose content an agent may be changing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hutch_shared.tree import LINKS, Entry, Tree, UnfitFileError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("SECRET")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a").write_text("SECRET")
    root = tmp_path / "project"
    (root / "docs" / "deep").mkdir(parents=True)
    (root / "a").write_text("own a")
    (root / "docs" / "a").write_text("own docs/a")
    return root


def read(root: Path, path: str, *, links: int = LINKS) -> tuple[bytes, str]:
    with Tree(str(root)) as tree:
        found = tree.read(path, 100, links=links)
    return found.data, found.path


def test_a_file_is_read_with_its_path(root: Path) -> None:
    """Dots and double slashes do not matter; `..` may lead anywhere inside the root."""
    for path in ("docs/a", "./docs//a", "docs/deep/../a", "docs/../docs/a"):
        assert read(root, path, links=0) == (b"own docs/a", "docs/a")


def test_a_long_file_is_cut(root: Path) -> None:
    """The limit counts bytes."""
    with Tree(str(root)) as tree:
        assert tree.read("a", 3) == (b"own", "a", True)
        assert tree.read("a", 5) == (b"own a", "a", False)


def test_links_inside_the_root_are_followed_if_the_caller_wants_it(root: Path) -> None:
    """The path of the result is the real one."""
    (root / "b").symlink_to("docs/a")
    (root / "docs" / "up").symlink_to("../a")
    (root / "folder").symlink_to(root / "docs")
    (root / "docs" / "deep" / "all").symlink_to("../..")

    for path in ("b", "folder/a", "docs/deep/all/b", "docs/deep/all/folder/a"):
        assert read(root, path) == (b"own docs/a", "docs/a")
        with pytest.raises(UnfitFileError, match="symbolic link"):
            read(root, path, links=0)
    assert read(root, "folder/up") == (b"own a", "a")
    assert read(root, "folder/a", links=1) == (b"own docs/a", "docs/a")
    with pytest.raises(UnfitFileError, match="symbolic link"):
        read(root, "folder/up", links=1)


LEADS_OUT: dict[str, tuple[str, str]] = {
    "a file": ("../secret", "link"),
    "by an absolute path": ("{outside}/secret", "link"),
    "of a folder": ("../private", "link/a"),
    "of a folder, absolute": ("{outside}/private", "link/a"),
    "through the root": ("../project/../secret", "link"),
    "through the root, absolute": ("{outside}/project/../secret", "link"),
    "of a longer name": ("{outside}/project-2", "link"),
    "to itself": ("link", "link"),
    "to the root of the system": ("/", "link/etc/hostname"),
}


@pytest.mark.parametrize("links", [0, LINKS])
@pytest.mark.parametrize("case", LEADS_OUT)
def test_a_link_out_of_the_root_is_never_followed(root: Path, case: str, links: int) -> None:
    """The kernel follows no link, and this module none that leads out."""
    (root.parent / "project-2").write_text("SECRET")
    target, path = LEADS_OUT[case]
    (root / "link").symlink_to(target.format(outside=root.parent))

    with pytest.raises(UnfitFileError):
        read(root, path, links=links)


@pytest.mark.parametrize("path", ["..", "../secret", "docs/../../secret", "a\0b", "x/" * 3000, "\ud800"])
def test_a_path_out_of_the_root_is_refused(root: Path, path: str) -> None:
    """Likewise a path that the system would not take."""
    with pytest.raises(UnfitFileError):
        read(root, path)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_folder])
def test_only_regular_files_are_read(root: Path, make: Callable[[Path], None]) -> None:
    """Nothing waits for another process."""
    make(root / "odd")

    with pytest.raises((UnfitFileError, OSError)):
        read(root, "odd")


def test_the_root_has_no_link(root: Path) -> None:
    """Neither the root itself nor a folder above it may be a link."""
    (root.parent / "alias").symlink_to(root)

    for path in ("alias", "alias/docs"):
        with pytest.raises(UnfitFileError):
            Tree(str(root.parent / path))
    with pytest.raises(FileNotFoundError):
        Tree(str(root.parent / "missing"))


def test_names_in_a_folder(root: Path) -> None:
    """They are sorted and bounded; a link is not a folder."""
    (root / "z").symlink_to("..")

    with Tree(str(root)) as tree:
        found = tree.entries("", 10)
        assert found == [Entry("a", False), Entry("docs", True), Entry("z", False)]
        assert len(tree.entries("", 2)) == 2
        assert (tree.has("z"), tree.has("docs/a"), tree.has("z/secret"), tree.has("no")) == (True, True, False, False)
        assert (tree.is_folder("docs"), tree.is_folder("z"), tree.is_folder("a")) == (True, False, False)


def test_no_descriptor_is_left_open(root: Path) -> None:
    """Also after an error, and in a deep tree."""
    deep = root / "/".join(["d"] * 200)
    deep.mkdir(parents=True)
    (deep / "f").write_text("x")
    (root / "loop").symlink_to("loop")
    before = len(os.listdir("/proc/self/fd"))

    for path in (f"{'d/' * 200}f", f"{'d/' * 200}{'../' * 200}a", "loop", "loop/x", "missing/x", "..", "docs", "d/.."):
        with suppress(OSError, UnfitFileError):
            read(root, path)
    with pytest.raises(UnfitFileError):
        Tree(str(root / "loop"))

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_swapped_folder_gives_no_foreign_byte(root: Path) -> None:
    """While an agent exchanges a file and the folders above it for links, a read gives the own file or an error."""
    (root / "docs" / "deep" / "a").write_text("own")
    (root.parent / "private" / "deep").mkdir()
    (root.parent / "private" / "deep" / "a").write_text("SECRET")
    ended = threading.Event()

    def swap() -> None:
        n = 0
        while not ended.is_set():
            for path, target in (
                ("docs", "../private"),
                ("docs/deep", "../../private"),
                ("docs/deep/a", "/etc/passwd"),
            ):
                away = root / f"away{n}"
                n += 1
                os.rename(root / path, away)
                os.symlink(target, root / path)
                os.unlink(root / path)
                os.rename(away, root / path)

    swapping = threading.Thread(target=swap)
    swapping.start()
    found: set[bytes] = set()
    try:
        for _ in range(3000):
            with suppress(OSError, UnfitFileError):
                found.add(read(root, "docs/deep/a")[0])
    finally:
        ended.set()
        swapping.join()

    assert found == {b"own"}
