"""The usage of a turn: tokens and dollars, from the sums that the CLI keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hutch_executor.runners.claude.lines import ModelUsage
from hutch_shared.events import Notice, UsageSeen

__all__ = ["USAGE_UNKNOWN", "UsageMeter", "total"]

USAGE_UNKNOWN: Final = Notice(
    "usage_unknown",
    "Claude Code did not report readable usage, so what this turn used is unknown. A later turn whose usage is"
    " readable includes it.",
)


class UsageMeter:
    """Turns the CLI's sums since its start into the usage of each turn."""

    def __init__(self, before: dict[str, ModelUsage] | None) -> None:
        """Start from the sums of a resumed conversation, or from None if they are unknown."""
        self._before = before
        self._doubtful: dict[str, ModelUsage] | None = None
        """The last sums if they were smaller than `_before`: one of the two is wrong."""

    def turn(self, sums: Mapping[str, ModelUsage | None] | None, *, asked: bool = True) -> list[UsageSeen] | None:
        """Return the usage since the last call, by model; models without usage are left out.

        None if it is unknown: the sums cannot be read, are smaller than before, or say nothing although a model was
        `asked`. Later sums include the usage of this turn, unless they stay smaller: then counting goes on from there.
        With unknown starting sums the first call returns None, and its usage is never counted: that is better than
        counting the earlier turns twice.
        """
        now = _readable(sums)
        if now is None or (asked and not now):
            return None
        used = None if self._before is None else _difference(self._before, now)
        if used is None and self._doubtful is not None:
            used = _difference(self._doubtful, now)
        if used is not None or self._before is None:
            self._before, self._doubtful = now, None
        else:
            self._doubtful = now
        return used


_NOTHING: Final = ModelUsage(0, 0, 0, 0, 0.0)


def _readable(sums: Mapping[str, ModelUsage | None] | None) -> dict[str, ModelUsage] | None:
    """Return the sums, {} if there are none, or None if those of a model are unknown."""
    known = {model: usage for model, usage in (sums or {}).items() if usage is not None}
    return known if sums is None or len(known) == len(sums) else None


def _difference(before: dict[str, ModelUsage], now: dict[str, ModelUsage]) -> list[UsageSeen] | None:
    """Return the usage between two sums; None if the sum of a model became smaller."""
    used: list[UsageSeen] = []
    for model in {**before, **now}:
        seen = _since(before.get(model, _NOTHING), now.get(model, _NOTHING), model)
        if seen is None:
            return None
        if seen.input_tokens or seen.output_tokens or seen.cache_read_tokens or seen.cache_write_tokens or seen.usd:
            used.append(seen)
    return used


def _since(before: ModelUsage, now: ModelUsage, model: str) -> UsageSeen | None:
    """Return the difference of two sums; None if one became smaller."""
    counts = (
        now.input_tokens - before.input_tokens,
        now.output_tokens - before.output_tokens,
        now.cache_read_input_tokens - before.cache_read_input_tokens,
        now.cache_creation_input_tokens - before.cache_creation_input_tokens,
    )
    usd = round(now.cost_usd - before.cost_usd, 9)
    return UsageSeen(*counts, usd, model, total=True) if min(*counts, usd) >= 0 else None


def total(used: list[UsageSeen]) -> UsageSeen | None:
    """Return the sum over all models; None if nothing was used."""
    if not used:
        return None
    return UsageSeen(
        sum(u.input_tokens for u in used),
        sum(u.output_tokens for u in used),
        sum(u.cache_read_tokens for u in used),
        sum(u.cache_write_tokens for u in used),
        round(sum(u.usd or 0.0 for u in used), 9),
        used[0].model if len(used) == 1 else None,
        total=True,
    )
