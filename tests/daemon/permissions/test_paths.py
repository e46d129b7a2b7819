"""Path rules."""

from __future__ import annotations

import pytest

from hutch_daemon.permissions.paths import (
    PathTarget,
    absolute,
    compile_pattern,
    folded,
    inside,
    plain,
    protected_name,
)


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("//etc/**", "/etc/a/b", True),
        ("//etc/**", "/etcx/a", False),
        ("~/.ssh", "/home/u/.ssh/id", True),
        ("/src/*.c", "/project/src/a.c", True),
        ("/src/*.c", "/w/src/a.c", False),
        ("src/**", "/w/src/a/b", True),
        ("src/**", "/w/x/src/a", False),
        ("./a.py", "/w/a.py", True),
        ("./a.py", "/w/x/a.py", False),
        ("a.py", "/w/x/y/a.py", True),
        ("a.py", "/other/a.py", False),
        ("build/", "/w/x/build/o", True),
        ("**/x/**/y", "/w/a/x/b/c/y", True),
        ("**/x/**/y", "/w/x/y", True),
        ("a/*/b", "/w/a/x/y/b", False),
        ("*.[ch]", "/w/a.h", True),
        ("**", "/w/a", True),
        ("**", "/w", True),
        ("**", "/x", False),
        ("A.py", "/w/a.py", False),
    ],
)
def test_a_pattern_covers_a_path_and_everything_below(pattern: str, path: str, covered: bool) -> None:
    """The first characters of a pattern give its start; `*` matches within one name, `**` any number of names."""
    compiled = compile_pattern(pattern, base="/project", home="/home/u", fold=False)

    assert compiled.covers(path, "/w") is covered


@pytest.mark.parametrize("path", ["/w/.ENV", "/x/.env/a", "/w/.e\u200bnv", "/W/.Env"])
def test_a_deny_pattern_ignores_case_and_directory(path: str) -> None:
    """A bare name is denied in every directory, whatever the file system's rules for letter case."""
    assert compile_pattern(".env", base="/", home="/home/u", fold=True).covers(path, "/w")


@pytest.mark.parametrize(
    ("pattern", "directory", "possible"),
    [
        (".env", "/w", True),
        ("/secrets/**", "/w", True),
        ("/secrets/**", "/w/src", False),
        ("src/*/x", "/w/src/a", True),
        ("//etc/x", "/", True),
        ("//etc/x", "/usr", False),
        ("**/x", "/w/a/b", True),
    ],
)
def test_a_pattern_may_match_below_a_directory(pattern: str, directory: str, possible: bool) -> None:
    """The answer is no only if no path below the directory can match."""
    assert compile_pattern(pattern, base="/w", home="/home/u", fold=True).may_lie_below(directory, "/w") is possible


def test_many_stars_take_little_time() -> None:
    """Matching takes time in proportion to names × names, even with many stars."""
    pattern = compile_pattern("/".join(["**", "*a*a*a*"] * 40) + "/z", base="/", home="/", fold=False)

    assert not pattern.covers("/w/" + "/".join(["a" * 200] * 150), "/w")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/w/.git/config", ".git"),
        ("/w/.Git/x", ".git"),
        ("/w/.git./x", ".git"),
        ("/w/.gi\u200bt/x", ".git"),
        ("/w/.gitignore", None),
        ("/w/git", None),
        ("/home/u/.bashrc", ".bashrc"),
        ("/h/.config/fish/x", ".config/fish"),
    ],
)
def test_paths_that_can_make_programs_run_are_protected(path: str, name: str | None) -> None:
    """A protected name is recognised anywhere in a path, on every file system."""
    assert protected_name(path) == name


def test_a_path_keeps_its_dots_until_its_links_are_resolved() -> None:
    """`..` means the parent of a link's target, which the text does not show."""
    assert absolute("a/../b", "/w", "/home/u") == "/w/a/../b"
    assert absolute("~/x", "/w", "/home/u") == "/home/u/x"
    assert plain("/w/a/../b//c/.") == "/w/b/c"
    assert plain("//x") == "/x"


def test_a_directory_is_not_a_text_prefix() -> None:
    """`/w` contains itself and paths below it, but not `/w-evil`."""
    assert [inside(path, "/w") for path in ("/w", "/w/a", "/w-evil", "/")] == [True, True, False, False]
    assert inside("/any", "/")


def test_an_unresolved_path_is_inside_no_directory() -> None:
    """A path counts as inside a directory only if that is known."""
    assert PathTarget("/w/a", "/w/a").within("/w")
    assert not PathTarget("/w/a", None).within("/w")
    assert not PathTarget("/w/a", "/etc/a").within("/w")


def test_letters_fold_in_every_script() -> None:
    """Composed and decomposed letters of either case are the same name."""
    assert folded("É") == folded("e\u0301")
