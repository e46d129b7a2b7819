"""The CLI's configuration directory of one session, and the conversations that are carried over into it.

Theory. The CLI writes its transcripts, its plans and the overflow of tool results below its configuration directory,
and so can the agent. The user's own CLI takes files in `~/.claude` as instructions, so that no session may use that
directory. Each session has a directory of its own, beside the spools of its account, that nothing else reads.

A conversation can begin elsewhere: in the directory of the session that a fork continues, or in `~/.claude`, where
earlier versions of Hutch and the user's own CLI keep theirs. Its transcript is copied when it is needed first. The
original is never changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, Final

from hutch_executor.account.agent_dir import agent_dir_of
from hutch_executor.runners.claude.transcripts import transcript_folders
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.removal import remove_anything
from hutch_shared.tree import Tree, UnfitFileError

__all__ = ["ConfigDirectory", "transcripts_name", "unknown_conversation"]

TRANSCRIPT_LIMIT: Final = 512 << 20
"""Bytes of the longest transcript that is carried over."""
_OWN_SETTINGS: Final = (".claude.json", ".config.json")
"""The files in which the CLI keeps its own state, by their present and their former name. It obeys `env` in them."""
_OWN_BACKUPS: Final = "backups"
"""The folder of their copies. If only a copy is there, the CLI complains about that."""
_NOTE: Final = "hutch-conversation"
"""The file with the id of a conversation whose first turn has begun. The CLI reads no file of this name."""
_NOTE_LIMIT: Final = 200
"""Bytes of it that are read: more than an id has."""
_PLAN_LIMIT: Final = 1 << 20
_NAME_LIMIT: Final = 200
"""Characters after which the CLI cuts the name of a transcript folder and adds a hash."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SLUG: Final = re.compile(rb'"slug":"([A-Za-z0-9-]{1,100})"')
_MESSAGE: Final = re.compile(rb'\{.*"type":\s*"(user|assistant)"')
_SEARCHED: Final = 16 << 20
"""Bytes of a transcript in which its first message is searched for."""
_BLOCK: Final = 1 << 20


class ConfigDirectory:
    """The directory of one session. All methods block; they raise HutchError `agent_unavailable` if the disk fails."""

    def __init__(self, session: m.PrepareSession) -> None:
        """Find the paths for `session`, whose cwd is a real path."""
        self.path = agent_dir_of(session)
        self._transcripts = f"projects/{transcripts_name(session.cwd)}"
        self._users = os.path.join(session.home, ".claude")

    def __repr__(self) -> str:
        return f"<ConfigDirectory {self.path}>"

    def carry_over(self, conversation: str, elsewhere: Iterable[str]) -> bool:
        """Return whether the directory has the conversation's transcript; copy it from elsewhere if not.

        `elsewhere` are the directories of other sessions, in the order in which they are searched; the user's own is
        searched last. The CLI's file for a plan comes too.
        """
        if not _ID.fullmatch(conversation):
            return False
        if self._has(conversation):
            return True
        for directory in (*elsewhere, self._users):
            for found in _transcripts(directory, self._transcripts, conversation):
                try:
                    self._copy(directory, found, conversation)
                except (UnfitFileError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    continue  # not a file any more, or the agent left something else in the place of the copy
                except OSError as error:
                    why = f"The conversation cannot be copied to {self.path}: {error.strerror}."
                    raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
                return True
        return False

    def forget_settings(self) -> None:
        """Remove the CLI's own settings before it starts, since the agent could write them.

        The environment variables there would be the CLI's and its commands'. The CLI makes the file again.
        """
        try:
            with Tree(os.path.realpath(self.path)) as own:
                for name in _OWN_SETTINGS:
                    own.remove(name)
            remove_anything(os.path.join(self.path, _OWN_BACKUPS))
        except (OSError, UnfitFileError) as error:
            why = f"The CLI's settings in {self.path} cannot be removed: {error}."
            raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error

    def note(self, conversation: str | None) -> None:
        """Note the conversation that begins now, or that there is none any more. OSError, UnfitFileError."""
        with Tree(os.path.realpath(self.path)) as own:
            if conversation is None:
                own.remove(_NOTE)
            else:
                with own.writing(_NOTE) as file:
                    file.write(conversation.encode())

    def noted(self) -> str | None:
        """Return the noted conversation if its transcript here holds a message: hutchd learns it when a turn ends."""
        with suppress(OSError, UnfitFileError):
            with Tree(os.path.realpath(self.path)) as own:
                conversation = own.read(_NOTE, _NOTE_LIMIT).data.decode(errors="replace")
            if _ID.fullmatch(conversation) and self._has(conversation):
                return conversation
        return None

    def _has(self, conversation: str) -> bool:
        """Return whether a transcript here holds a message. The CLI silently resumes an empty or damaged one."""
        for transcript in _transcripts(self.path, self._transcripts, conversation):
            with (
                suppress(OSError, UnfitFileError),
                Tree(os.path.realpath(self.path)) as tree,
                tree.opened(transcript) as (file, _),
            ):
                left = _SEARCHED
                while left > 0 and (line := file.readline(left)):
                    if _MESSAGE.match(line):
                        return True
                    left -= len(line)
        return False

    def _copy(self, directory: str, transcript: str, conversation: str) -> None:
        """Copy a transcript, and before it its plan."""
        with (
            Tree(os.path.realpath(directory)) as elsewhere,
            Tree(os.path.realpath(self.path)) as own,
            elsewhere.opened(transcript) as (source, _),
        ):
            if os.fstat(source.fileno()).st_size > TRANSCRIPT_LIMIT:
                why = f"The conversation's transcript is larger than {TRANSCRIPT_LIMIT >> 20} MiB."
                raise HutchError(Reason.AGENT_UNAVAILABLE, why)
            with own.writing(f"{self._transcripts}/{conversation}.jsonl") as target:
                shutil.copyfileobj(source, target, _BLOCK)
                plan = f"plans/{_complete(target)}.md"
                if not own.has(plan):
                    with suppress(UnfitFileError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                        text = elsewhere.read(plan, _PLAN_LIMIT).data
                        with own.writing(plan) as copy:
                            copy.write(text)


def unknown_conversation() -> HutchError:
    """Return the error for a conversation that is stored nowhere."""
    message = "The conversation to resume is stored nowhere: neither Hutch nor Claude Code of this account has it."
    return HutchError(Reason.NOT_FOUND, message, word="resume_unknown")


def _transcripts(directory: str, usual: str, conversation: str) -> Iterator[str]:
    """Yield the paths, below a configuration directory, of files that may be the conversation's transcript."""
    name = f"{conversation}.jsonl"
    with suppress(OSError, UnfitFileError), Tree(os.path.realpath(directory)) as tree:
        for folder in sorted(transcript_folders(tree), key=lambda folder: folder != usual):
            if tree.has(f"{folder}/{name}"):
                yield f"{folder}/{name}"


def _complete(transcript: BinaryIO) -> str:
    """Cut off a last line that is not whole, since its CLI may be writing it; return the name of the plan, or ""."""
    transcript.seek(0)
    slug, size, last = "", 0, b""
    for line in transcript:
        if found := _SLUG.search(line):
            slug = found[1].decode()
        size, last = size + len(line), line
    if last and not last.endswith(b"\n"):
        try:
            json.loads(last)
        except ValueError:
            transcript.truncate(size - len(last))
    return slug


def transcripts_name(cwd: str) -> str:
    """Return the CLI's name for the folder of the transcripts of `cwd`, a real path.

    The CLI counts UTF-16 code units, as JavaScript does; the SDK's own function counts characters.
    """
    encoded = unicodedata.normalize("NFC", cwd).encode("utf-16-le", "surrogatepass")
    units = [int.from_bytes(encoded[at : at + 2], "little") for at in range(0, len(encoded), 2)]
    name = "".join(chr(unit) if unit < 128 and chr(unit).isalnum() else "-" for unit in units)
    if len(name) <= _NAME_LIMIT:
        return name
    total = 0
    for unit in units:
        total = (total * 31 + unit) & 0xFFFF_FFFF
    total, digits = min(total, 2**32 - total), ""  # the absolute value of the signed number
    while total or not digits:
        total, digit = divmod(total, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return f"{name[:_NAME_LIMIT]}-{digits}"
