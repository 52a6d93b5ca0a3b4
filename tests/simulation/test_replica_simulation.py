"""Three to five brokers' replicas of one partition on real logs, with every fault, in one seeded
order (`replica_world`); and with one mistake at a time, each of which is caught (`replica_bugs`).

What holds after each step is in `replica_truth`. At the end nothing fails any more: then somebody
has to lead, all have to be in sync, and something has to be acknowledged.

The seed is in the message; `TIERLOG_SEED` runs from that one on.
"""

import os
import time

import pytest

from tests.fakes.soak import MINUTES
from tests.simulation.replica_bugs import BUGS
from tests.simulation.replica_world import run_seed
from tierlog.broker.cluster import first_sets
from tierlog.broker.replicas import replica_moves

FIRST_SEED = int(os.environ.get("TIERLOG_SEED", "0"))
SEEDS, SOAK_SEEDS = 20, 100_000
RARE_SEEDS = (740,)  # the bucket's log start is above that of who claims it
STEPS = 300
PATIENCE_S = 20  # of processor time, once changed code made other runs of the seeds
CAUGHT_BY = {
    "a follower acknowledges what it has not flushed": 0,
    "the watermark counts the new set only": 47,
    "the watermark is what the leader flushed": 0,
    "a fetch whose log parts from the leader's counts": 5,
    "acknowledgements of an earlier epoch count": 5,
    "a flush that failed is taken for done": 159,
    "an append is answered once the leader has flushed it": 11,
    "a replica joins that lacks what the leader began with": 1,
    "a replica joins that lacks a trim": 54,
    "the set shrinks below the minimum": 3,
    "a trim is answered when the leader made it": 19,
    "whoever is not in the set claims too": 10,
    "what a replica keeps is not on the medium": 0,
    "a claim of a former life is led": 0,
    "a follower is never told to cut": 3,
    "a follower cuts to its watermark": 3,
    "a follower forgets the producers of what it appends": 3,
    "a replica begins at its leader's local start without the bucket's producers": 2,
    "what is not committed is uploaded": 0,
    "what is not committed replaces what is": 4,
    "the bucket has what was sent to it": 5,
    "objects count in any order": 5,
    "a number that another object has counts": 5,
    "a chain is read that is written": 5,
    "a claim keeps the bucket in the set without the log's tail": 5,
}

RARELY = {  # in the soak, with patience of its own
    "the watermark counts the new set only": 600,
    "a flush that failed is taken for done": 600,  # of the seeds whose disks fail
    "a replica joins that lacks a trim": 600,
}


@pytest.fixture(autouse=True)
def hand_over_without_waiting(monkeypatch):
    monkeypatch.setattr(replica_moves, "HAND_OVER_S", 0.0)
    monkeypatch.setattr(first_sets, "STOP_S", 0.0)


def run(seed, root, disk):
    trace = []
    try:
        run_seed(seed, root / str(seed), disk, steps=STEPS, trace=trace)
    except Exception as error:
        print(*trace[-200:], sep="\n")
        raise AssertionError(f"TIERLOG_SEED={seed}: {error}") from error


def run_until_wrong(seed, root, disk, *, patience_s):
    until_s = time.process_time() + patience_s
    while time.process_time() < until_s:
        run(seed, root, disk)
        seed += 1


@pytest.mark.parametrize("seed", [*range(FIRST_SEED, FIRST_SEED + SEEDS), *RARE_SEEDS])
def test_replicas_keep_what_was_acknowledged_and_heal(seed, tmp_path, failing_disk):
    run(seed, tmp_path, failing_disk)


@pytest.mark.soak
def test_replicas_keep_what_was_acknowledged_for_a_long_time(tmp_path, failing_disk):
    until_s = time.monotonic() + MINUTES * 60
    first = FIRST_SEED + SEEDS
    for seed in range(first, first + SOAK_SEEDS):
        run(seed, tmp_path, failing_disk)
        if time.monotonic() >= until_s:
            break
    print(f"seeds {first} to {seed}")


def test_every_planted_bug_has_a_seed_that_is_to_catch_it():
    assert set(CAUGHT_BY) == set(BUGS)


@pytest.mark.parametrize(
    "bug", [pytest.param(one, marks=[pytest.mark.soak] if one in RARELY else []) for one in BUGS]
)
def test_a_planted_bug_is_caught(bug, tmp_path, failing_disk, monkeypatch):
    BUGS[bug](monkeypatch)
    patience_s = RARELY.get(bug, PATIENCE_S)
    with pytest.raises(AssertionError, match="TIERLOG_SEED"):
        run_until_wrong(CAUGHT_BY[bug], tmp_path, failing_disk, patience_s=patience_s)
