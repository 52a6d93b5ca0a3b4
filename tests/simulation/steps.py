"""Runs a simulation: random steps drawn from the world's seed, with a check after each.

A world has `random`; `check`, called after each step; `finish`, with the checks at the end; and
`close`.
"""

import os
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

import pytest


class World(Protocol):
    random: Random

    def check(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def seeds(count: int) -> list[Any]:
    """The first `count`, and under `make soak` ten times as many others; only `TIERLOG_SEED` if it
    is set.
    """
    seed = os.environ.get("TIERLOG_SEED")
    if seed is not None:
        return [int(seed)]
    more = range(count, 11 * count)
    return [*range(count), *(pytest.param(one, marks=pytest.mark.soak) for one in more)]


def run(world: World, weights: Mapping[Callable[[Any], None], int], count: int) -> None:
    drawn = world.random.choices(list(weights), list(weights.values()), k=count)
    try:
        for number, step in enumerate(drawn):
            print(number, step.__name__)
            step(world)
            world.check()
        world.finish()
    finally:
        world.close()
