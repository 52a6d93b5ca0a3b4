"""Runs a simulation: random steps drawn from the world's seed, with a check after each.

A world has `random`; `check`, called after each step; `finish`, with the checks at the end; and
`close`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol


class World(Protocol):
    random: Random

    def check(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def seeds(count: int) -> Sequence[int]:
    """Only `TIERLOG_SEED` if it is set."""
    seed = os.environ.get("TIERLOG_SEED")
    return range(count) if seed is None else [int(seed)]


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
