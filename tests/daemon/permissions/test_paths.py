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
def test_a_pattern_covers_what_it_names_and_all_below(pattern: str, path: str, covered: bool) -> None:
    """The first characters of a pattern say where it starts; one star is one name, two are any number."""
    compiled = compile_pattern(pattern, base="/project", home="/home/u", fold=False)

    assert compiled.covers(path, "/w") is covered


@pytest.mark.parametrize("path", ["/w/.ENV", "/x/.env/a", "/w/.e\u200bnv", "/W/.Env"])
def test_a_pattern_that_denies_ignores_case_and_place(path: str) -> None:
    """A bare name that is denied is denied in every directory, however a file system would fold its letters."""
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
def test_a_directory_may_hold_what_a_pattern_names(pattern: str, directory: str, possible: bool) -> None:
    """It can be told where nothing that a pattern names may lie below a directory."""
    assert compile_pattern(pattern, base="/w", home="/home/u", fold=True).may_lie_below(directory, "/w") is possible


def test_many_stars_take_little_time() -> None:
    """A pattern of many stars against a deep path is decided by names × names."""
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
def test_what_makes_programs_run_is_protected(path: str, name: str | None) -> None:
    """A path through a protected name is known for it on every file system."""
    assert protected_name(path) == name


def test_a_path_keeps_its_dots_until_links_were_followed() -> None:
    """Whoever resolves links needs the path in the order of its parts; the text alone gives another answer."""
    assert absolute("a/../b", "/w", "/home/u") == "/w/a/../b"
    assert absolute("~/x", "/w", "/home/u") == "/home/u/x"
    assert plain("/w/a/../b//c/.") == "/w/b/c"
    assert plain("//x") == "/x"


def test_a_directory_is_no_prefix_of_text() -> None:
    """`/w` holds itself and what lies below, not `/w-evil`."""
    assert [inside(path, "/w") for path in ("/w", "/w/a", "/w-evil", "/")] == [True, True, False, False]
    assert inside("/any", "/")


def test_a_place_that_nobody_resolved_is_nowhere() -> None:
    """What is not known to be inside a directory is not taken to be."""
    assert PathTarget("/w/a", "/w/a").within("/w")
    assert not PathTarget("/w/a", None).within("/w")
    assert not PathTarget("/w/a", "/etc/a").within("/w")


def test_letters_fold_in_every_script() -> None:
    """Composed and decomposed letters of any case are the same name."""
    assert folded("É") == folded("e\u0301")
