"""A removed or replaced key leaves the state of a real hutchd: a copy taken after the reply has none of it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from hutch_shared import messages as m
from tests.system.host import Host, host

pytestmark = pytest.mark.system

_PIECE = 12
"""The length, in bytes, of the pieces that sealed bytes are cut into. Any 23 bytes in a row contain a whole piece."""


def copied(made: Host, name: str) -> Path:
    """Copy the state directory while hutchd runs; return the copy."""
    copy = made.root / name
    shutil.copytree(made.state, copy, ignore=lambda folder, names: [one for one in names if one.endswith(".sock")])
    return copy


def sealed_in(copy: Path) -> dict[tuple[str, str], bytes]:
    """Return the sealed bytes of each key in a copy of the state directory, by provider and name."""
    with closing(sqlite3.connect(copy / "hutch.db")) as database:
        return {
            (provider, name): sealed
            for provider, name, sealed in database.execute("SELECT provider, name, sealed FROM keys")
        }


def pieces_in(copy: Path, sealed: bytes) -> list[str]:
    """Return the names of the files that contain a piece of `sealed`."""
    pieces = {sealed[at : at + _PIECE] for at in range(0, len(sealed) - _PIECE + 1, _PIECE)}
    contents = {path.name: path.read_bytes().strip(b"\0") for path in copy.rglob("*") if path.is_file()}
    return [name for name, content in contents.items() if any(piece in content for piece in pieces)]


async def test_no_sealed_bytes_of_a_key_outlive_its_removal() -> None:
    """After `key rm`, and after `key add` for the same name, no file of the state has a piece of the old envelope."""
    names = [f"n{number}" for number in range(12)]
    removed_names = [*names[::3], names[1]]
    long = "sk-" + "0123456789abcdef" * 120  # more than half a page: rows move between pages
    async with host("[executors]\nspares = 0\n") as made, made.client() as hutch:

        async def add(provider: str, name: str, secret: str) -> None:
            await hutch.call("put_api_key", m.PutApiKey(provider, secret, name=name))

        for name in names:
            await add("anthropic", name, long + name)
        await add("openai", "default", "sk-openai-0123456789")
        before = copied(made, "before")
        sealed = sealed_in(before)
        there = {name: pieces_in(before, sealed["anthropic", name]) for name in names}
        said = (await made.hutch("key", "rm", "anthropic", "--name", names[0])).err
        for name in removed_names[1:]:
            await hutch.call("delete_api_key", m.DeleteApiKey("anthropic", name))
        removed = copied(made, "removed")
        await add("openai", "default", "sk-openai-9876543210")
        await add("anthropic", names[2], f"{long}-replaced")
        replaced = copied(made, "replaced")
        kept = sealed_in(replaced)
        after_removal = {name: pieces_in(removed, sealed["anthropic", name]) for name in names}
        after_replacement = [
            pieces_in(replaced, sealed[key]) for key in (("openai", "default"), ("anthropic", names[2]))
        ]

    assert said == ""
    assert all(there.values())
    assert [name for name, files in after_removal.items() if not files] == sorted(removed_names, key=names.index)
    assert after_replacement == [[], []]
    assert {name for _, name in kept} == {*names, "default"} - {*removed_names}
    assert kept["anthropic", names[4]] == sealed["anthropic", names[4]]
