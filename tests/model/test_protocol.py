"""The protocol of `docs/cluster.md`: walks at random through what may happen, and a search through
all of it in a small world. And the protocol with one mistake at a time, each of which is caught.

The seed of a walk is in the message; `TIERLOG_SEED` runs the walks from that one on.
"""

import os

import pytest

from tests.fakes.soak import MINUTES
from tests.model.planted_bugs import BUGS
from tests.model.rules import Rules
from tests.model.scenarios import CAUGHT_BY, SCENARIOS, SMALL
from tests.model.search import search, walks

FIRST_SEED = int(os.environ.get("TIERLOG_SEED", "0"))
SEARCH_S = 120  # of processor time; a larger world is searched as far as that goes
PATIENCE_S = 20  # of processor time, once changed code made other walks of the seeds


def test_every_planted_bug_has_a_scenario_that_is_to_catch_it():
    assert set(CAUGHT_BY) == set(BUGS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_walk_finds_a_violation(scenario):
    result = walks(SCENARIOS[scenario], Rules(), seconds=0.5, first_seed=FIRST_SEED)
    print(scenario, result)
    assert result.found is None


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug):
    scenario, seed = CAUGHT_BY[bug]
    result = walks(SCENARIOS[scenario], BUGS[bug](), seconds=PATIENCE_S, first_seed=seed)
    print(scenario, result)
    assert result.found is not None


@pytest.mark.parametrize(
    "small",
    [pytest.param(one, marks=[] if SMALL[one][2] else pytest.mark.soak) for one in SMALL],
)
def test_nothing_that_may_happen_in_a_small_world_is_a_violation(small):
    world, max_epoch, is_quick = SMALL[small]
    worlds, is_all = search(world, Rules(), max_epoch=max_epoch, seconds=SEARCH_S)
    print(small, worlds, is_all)
    assert is_all or not is_quick


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_long_walk_finds_a_violation(scenario):
    seconds = MINUTES * 60 / len(SCENARIOS)
    result = walks(SCENARIOS[scenario], Rules(), seconds=seconds, first_seed=10**6 + FIRST_SEED)
    print(scenario, result)
    assert result.found is None
