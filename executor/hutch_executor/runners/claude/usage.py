"""The usage of a turn: tokens and dollars, from the sums that the CLI keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hutch_executor.runners.claude.lines import ModelUsage
from hutch_shared.events import Notice, UsageSeen

__all__ = ["USAGE_UNKNOWN", "UsageMeter", "total"]

USAGE_UNKNOWN: Final = Notice(
    "usage_unknown",
    "Claude Code did not report readable usage, so what this turn used is unknown. It is counted with the next turn"
    " whose usage is known.",
)


class UsageMeter:
    """Turns the CLI's sums since its start into the usage of each turn."""

    def __init__(self, before: dict[str, ModelUsage] | None) -> None:
        """Start from the sums of a resumed conversation, or from None if they are unknown."""
        self._before = before

    def turn(self, sums: Mapping[str, ModelUsage | None] | None, *, asked: bool = True) -> list[UsageSeen] | None:
        """Return the usage since the last call, by model; models without usage are left out.

        None if it is unknown: the sums cannot be read, are smaller than before, or say nothing although a model was
        `asked`. The next known sums then include the usage of this turn. With unknown starting sums the first call
        returns None, and its usage is never counted: that is better than counting the earlier turns twice.
        """
        known, now = self._before, _readable(sums)
        if now is None or (asked and not now):
            return None
        if known is None:
            self._before = now
            return None
        used: list[UsageSeen] = []
        for model in {**known, **now}:
            seen = _since(known.get(model, _NOTHING), now.get(model, _NOTHING), model)
            if seen is None:
                return None
            if seen.input_tokens or seen.output_tokens or seen.cache_read_tokens or seen.cache_write_tokens or seen.usd:
                used.append(seen)
        self._before = now
        return used


_NOTHING: Final = ModelUsage(0, 0, 0, 0, 0.0)


def _readable(sums: Mapping[str, ModelUsage | None] | None) -> dict[str, ModelUsage] | None:
    """Return the sums, {} if there are none, or None if those of a model are unknown."""
    known = {model: usage for model, usage in (sums or {}).items() if usage is not None}
    return known if sums is None or len(known) == len(sums) else None


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
