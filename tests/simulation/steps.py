"""How a simulation runs: steps drawn by its world's seed, and what must hold after each.

A world has `random`; `check`, called after a step; `finish`, for what must hold at the end; and
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
    one = os.environ.get("TIERLOG_SEED")
    return range(count) if one is None else [int(one)]


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
