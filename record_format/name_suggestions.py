"""Suggestions for unknown names in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix for an error message, such as `; did you mean 'orders'?`; "" without a match."""
    match = closest_match(name, known, cutoff=0.75)
    return f"; did you mean {match!r}?" if match is not None else ""


def closest_match(name: str, known: Iterable[str], *, cutoff: float) -> str | None:
    """The most similar name; None below `cutoff`, from 0 (nothing in common) to 1 (equal)."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=cutoff)), None)
