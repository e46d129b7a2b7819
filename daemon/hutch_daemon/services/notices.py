"""Notices for administrators: one sentence for each subject, the newest last."""

from __future__ import annotations

import structlog

__all__ = ["Notices"]

_log = structlog.get_logger(__name__)


class Notices:
    """The notices of this hutchd. They are only in memory."""

    def __init__(self) -> None:
        """Start without notices."""
        self._sentences: dict[str, str] = {}

    def add(self, subject: str, sentence: str) -> None:
        """Add a notice, or replace the one about the same subject; an empty sentence ends it. Each change is logged."""
        before = self._sentences.get(subject, "")
        if sentence == before:
            return
        self._sentences.pop(subject, None)
        if sentence:
            _log.warning("notice", word=subject, message=sentence)
            self._sentences[subject] = sentence
        else:
            _log.info("a notice ends", word=subject, message=before)

    def all(self) -> tuple[str, ...]:
        """Return the sentences."""
        return tuple(self._sentences.values())
