"""The usage of a turn: tokens and dollars, from the sums that the CLI keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hutch_executor.runners.claude.lines import ModelUsage, ResultLine
from hutch_shared.events import Notice, UsageSeen

__all__ = ["USAGE_UNKNOWN", "UsageMeter", "total"]

USAGE_UNKNOWN: Final = Notice(
    "usage_unknown", "Claude Code did not report usage that can be read, so what this turn used is unknown."
)


class UsageMeter:
    """Turns the CLI's sums since its start into the usage of each turn."""

    def __init__(self, before: dict[str, ModelUsage] | None) -> None:
        """Start from the sums of a resumed conversation, or from None if they are unknown."""
        self._before = before
        self._doubtful: dict[str, ModelUsage] | None = None
        """The last sums if they were smaller than `_before`: one of the two is wrong. None if they were not."""

    def turn(self, result: ResultLine, *, asked: bool = True) -> list[UsageSeen] | None:
        """Return the usage since the last call, by model; models without usage are left out.

        The difference of the sums counts. Where there is none, the CLI's own count for the turn does: one odd number
        of a gateway spoils the sums of that CLI for ever. None if both are unknown: they cannot be read, the sums are
        smaller than before, or they say nothing although a model was `asked`. The next readable sums include such a
        turn. Sums that are smaller than before twice, and grow between, are right: counting goes on from there.
        """
        sums, own = _readable(result.model_usage), _readable(result.usage_of_turn)
        if not sums:
            if not asked and sums is not None:
                return []
            sums = None
        used = _difference(self._before, sums)
        if used is None:
            used = _difference(self._doubtful, sums)
        if used is not None:
            self._before, self._doubtful = sums, None
        elif own:
            used = _difference({}, own)
            self._doubtful = sums
            self._before = sums if self._before is None else _added(self._before, own)
        elif self._before is None:
            self._before = sums
        elif sums is not None:
            self._doubtful = sums
        return used


_NOTHING: Final = ModelUsage(0, 0, 0, 0, 0.0)


def _readable(usage: Mapping[str, ModelUsage | None] | None) -> dict[str, ModelUsage] | None:
    """Return the usage by model; None if it is missing, or that of a model cannot be read."""
    known = {model: one for model, one in (usage or {}).items() if one is not None}
    return known if usage is not None and len(known) == len(usage) else None


def _difference(before: dict[str, ModelUsage] | None, now: dict[str, ModelUsage] | None) -> list[UsageSeen] | None:
    """Return the usage between two sums; None if one is unknown, or the sum of a model became smaller."""
    if before is None or now is None:
        return None
    used: list[UsageSeen] = []
    for model in {**before, **now}:
        seen = _since(before.get(model, _NOTHING), now.get(model, _NOTHING), model)
        if seen is None:
            return None
        if seen.input_tokens or seen.output_tokens or seen.cache_read_tokens or seen.cache_write_tokens or seen.usd:
            used.append(seen)
    return used


def _added(sums: dict[str, ModelUsage], more: dict[str, ModelUsage]) -> dict[str, ModelUsage]:
    """Return the sums with the usage of one more turn."""
    total = dict(sums)
    for model, usage in more.items():
        before = total.get(model, _NOTHING)
        total[model] = ModelUsage(
            before.input_tokens + usage.input_tokens,
            before.output_tokens + usage.output_tokens,
            before.cache_read_input_tokens + usage.cache_read_input_tokens,
            before.cache_creation_input_tokens + usage.cache_creation_input_tokens,
            before.cost_usd + usage.cost_usd,
            usage.cost_basis,
        )
    return total


def _since(before: ModelUsage, now: ModelUsage, model: str) -> UsageSeen | None:
    """Return the difference of two sums; None if one became smaller. Its dollars are None if they are unknown."""
    counts = (
        now.input_tokens - before.input_tokens,
        now.output_tokens - before.output_tokens,
        now.cache_read_input_tokens - before.cache_read_input_tokens,
        now.cache_creation_input_tokens - before.cache_creation_input_tokens,
    )
    usd = round(now.cost_usd - before.cost_usd, 9)
    if min(*counts, usd) < 0:
        return None
    return UsageSeen(*counts, None if now.cost_basis == "unknown" else usd, model, total=True)


def total(used: list[UsageSeen]) -> UsageSeen | None:
    """Return the sum over all models; None if nothing was used. Its dollars are unknown if those of a model are."""
    if not used:
        return None
    known = [u.usd for u in used if u.usd is not None]
    return UsageSeen(
        sum(u.input_tokens for u in used),
        sum(u.output_tokens for u in used),
        sum(u.cache_read_tokens for u in used),
        sum(u.cache_write_tokens for u in used),
        round(sum(known), 9) if len(known) == len(used) else None,
        used[0].model if len(used) == 1 else None,
        total=True,
    )
