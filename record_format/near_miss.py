"""The end of an error about an unknown name: the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'orders'?`, or nothing if none is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""
