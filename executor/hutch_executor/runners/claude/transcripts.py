"""Where the CLI's transcripts lie, and what they show about a prompt.

The agent can write them: they are evidence about its own work only. The CLI stores a prompt with its uuid some tenths
of a second after it has begun it. A CLI that is killed before that may have begun an answer, but has run no tool: each
call waits for hutchd, for which the turn runs by then. So a prompt whose uuid is in no transcript of the session had no
effect, and may be submitted again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO, Final, Literal

from hutch_shared.tree import Tree, UnfitFileError

__all__ = ["keeps_turn", "lacks_prompt", "transcript_folders"]

_FOLDER: Final = "projects"
_NAMES: Final = 10_000
_BYTES: Final = 4 << 30
_CHUNK: Final = 1 << 20
_END: Final = 4 << 20
"""Bytes at the end of a transcript in which a turn is searched for first."""
_ANSWERS: Final = (b'"type":"assistant"', b'"type": "assistant"')


def lacks_prompt(config: str, uuid: str) -> bool:
    """Return whether all transcripts in a configuration directory show that no conversation there has the prompt.

    False if one has it, or if something prevents a complete look. True if there are no transcripts. Blocks.
    """
    try:
        with Tree(os.path.realpath(config)) as tree:
            return _all_lack(tree, transcript_folders(tree), uuid.encode())
    except FileNotFoundError:
        return True
    except (OSError, UnfitFileError):
        return False


def keeps_turn(config: str, conversation: str, uuid: str, *, answered: bool) -> bool:
    """Return whether a transcript of the conversation has the prompt and, if it was `answered`, an answer after it.

    True also if something prevents a look, since that is no evidence. Blocks.
    """
    try:
        with Tree(os.path.realpath(config)) as tree:
            for folder in (_FOLDER, *transcript_folders(tree)):
                transcript = f"{folder}/{conversation}.jsonl"
                if tree.has(transcript):
                    with tree.opened(transcript) as (file, _):
                        size = file.seek(0, os.SEEK_END)
                        starts = dict.fromkeys((max(0, size - _END), 0))
                        looks = (_find_turn(file, start, uuid.encode()) for start in starts)
                        found = next(filter(None, looks), None)
                    if found == "answer" or (found == "prompt" and not answered):
                        return True
    except FileNotFoundError:
        return False
    except (OSError, UnfitFileError):
        return True
    return False


def _find_turn(file: BinaryIO, start: int, mark: bytes) -> Literal["prompt", "answer"] | None:
    """Return whether only the prompt with `mark` comes after `start`, or a whole line with an answer to it, too."""
    file.seek(start)
    found = False
    for line in file:
        found = found or mark in line  # an answer names the prompt that it follows
        if found and line.endswith(b"\n") and any(answer in line for answer in _ANSWERS):
            return "answer"
    return "prompt" if found else None


def transcript_folders(tree: Tree) -> list[str]:
    """Return the paths of the folders of transcripts in a configuration directory; the number is bounded.

    OSError, UnfitFileError.
    """
    return [f"{_FOLDER}/{one.name}" for one in tree.entries(_FOLDER, _NAMES) if one.is_folder]


def _all_lack(tree: Tree, folders: list[str], mark: bytes) -> bool:
    """Return whether no transcript contains `mark`; False for one that disappears before it is read."""
    left = _BYTES
    with suppress(OSError, UnfitFileError):
        for name in _transcripts(tree, folders):
            with tree.opened(name) as (file, _):
                read, found = _search(file, mark, left)
            left -= read
            if found or left <= 0:
                return False
        return True
    return False


def _transcripts(tree: Tree, folders: list[str]) -> list[str]:
    """Return the paths of the transcripts. UnfitFileError if there are too many names to look at."""
    found: list[str] = []
    names = 0
    for folder in (_FOLDER, *folders):
        entries = tree.entries(folder, _NAMES)
        names += len(entries)
        if names >= _NAMES:
            raise UnfitFileError("it has too many names")
        found += [f"{folder}/{one.name}" for one in entries if one.name.endswith(".jsonl")]
    return found


def _search(file: BinaryIO, mark: bytes, limit: int) -> tuple[int, bool]:
    """Return the bytes read, at most about `limit`, and whether `mark` is among them."""
    read, tail = 0, b""
    while read < limit and (chunk := file.read(_CHUNK)):
        read += len(chunk)
        if mark in tail + chunk:
            return read, True
        tail = chunk[-len(mark) :]
    return read, False
