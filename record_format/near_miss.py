"""Unknown names: the one that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'orders'?`, the end of an error, or nothing if none is near."""
    near = nearest(name, known, likeness=0.75)
    return f"; did you mean {near!r}?" if near is not None else ""


def nearest(name: str, known: Iterable[str], *, likeness: float) -> str | None:
    """The most alike, from `likeness` on: from 0, nothing in common, to 1, the same."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=likeness)), None)
