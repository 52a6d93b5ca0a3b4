"""Rates out of samples of totals: the same for all charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

RING: Final = 720  # samples that are kept


class Timed(Protocol):
    @property
    def at_ms(self) -> int: ...


S = TypeVar("S", bound=Timed)


def new_pairs(samples: Sequence[S], *, after_ms: int) -> list[tuple[S, S]]:
    """Each sample after `after_ms` with the one before it; of all of them if that is in the future,
    because the clock was set back. The very first sample has none before it and is left out.
    """
    if samples and after_ms > samples[-1].at_ms:
        after_ms = -1
    return [(one, two) for one, two in pairwise(samples) if two.at_ms > max(after_ms, one.at_ms)]


def rate(one: Timed, two: Timed, name: str) -> float:
    """What a total grew by, a second."""
    more = float(getattr(two, name) - getattr(one, name))
    return round(max(0.0, more) * 1000 / (two.at_ms - one.at_ms), 1)
