"""How a simulation goes: steps that its world's seed draws, and what must hold after each.

A world has `random`; `check`, for after a step; `finish`, for what must hold in the end; `close`.
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
    """`TIERLOG_SEED`'s alone where it is set."""
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
