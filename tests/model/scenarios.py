"""The worlds that walks begin in, each with room for some of what may happen. In a small one what
it has room for comes together often.
"""

from tests.model.rules import Rules
from tests.model.steps import Steps
from tests.model.world import Budget, World, new_world

NONE = Budget(*[0] * len(Budget._fields))


def after(w: World, *script: str, left: Budget) -> World:
    """The world after these steps, with the last option where there are several, and `left`."""
    steps = Steps(Rules(), lambda options: options[-1])
    w = w._replace(left=Budget(*[9] * len(Budget._fields)))
    for line in script:
        name, _, node = line.partition(" ")
        following = getattr(steps, name)(w, w.replicas["ABC".index(node or "A")])
        assert following, line
        w = following
    return w._replace(left=left)


LED = ("claim A", "land", "settle A")
WRITTEN = ("append A", "flush A", "write_wal A")
TRIMMABLE = (
    *(*LED, "claim_manifest A", "land_manifest", "settle_manifest A"),
    *(*WRITTEN, "land_wal", "read_wal A", "advance A"),
)
SENT = (*LED, "look B", "fetch B", "hear_fetch A", "change A")

SCENARIOS: dict[str, World] = {
    "three": new_world(left=Budget(reassignments=1, trims=1, reads=1, offloads=2, deletions=2)),
    "pair": new_world(2, left=Budget(records=3, offloads=2, deletions=1), min_in_sync=1),
    "tiers": new_world(
        2,
        left=NONE._replace(records=4, claims=4, changes=2, crashes=1, offloads=4, deletions=3),
        min_in_sync=1,
    ),
    "tiers of three": new_world(
        left=NONE._replace(
            records=4, claims=3, changes=3, crashes=2, losses=2, trims=1, offloads=4, deletions=3
        ),
    ),
    "deposed": after(
        new_world(2, min_in_sync=1),
        *(*LED, "append A", "flush A", "look B", "fetch B", "flush B", "fetch B"),
        *("hear_fetch A", "advance A"),
        left=NONE._replace(records=1, claims=1, offloads=4, deletions=2),
    ),
    "anew": after(
        new_world(min_in_sync=1, in_sync="A"),
        *(*LED, "append A", "flush A", "advance A", "look B", "fetch B", "flush B", "fetch B"),
        left=NONE._replace(claims=1, changes=2, losses=1),
    ),
    "store": new_world(
        left=Budget(wal_objects=6, fences=4, offloads=2, losses=0, collections=1, hints=2),
        in_sync="AB",
        with_store=True,
    ),
    "changes": new_world(left=NONE._replace(records=3, claims=4, changes=5, crashes=2, hints=2)),
    "claims": new_world(
        left=NONE._replace(records=4, claims=5, crashes=3, hints=4, resignations=1)
    ),
    "alone": new_world(
        2,
        left=NONE._replace(records=2, claims=3, changes=3, crashes=3, alone=2),
        min_in_sync=1,
    ),
    "trims": new_world(
        2, left=NONE._replace(records=2, claims=3, changes=3, trims=1), min_in_sync=1
    ),
    "reads": after(
        new_world(2, min_in_sync=1), *LED, left=NONE._replace(records=1, claims=1, reads=1)
    ),
    "asleep": after(
        new_world(), *LED, left=NONE._replace(records=2, claims=3, changes=2, collections=2)
    ),
    "given away": after(
        new_world(2, in_sync="A", min_in_sync=1),
        *(*SENT, "crash A", "start A"),
        left=NONE._replace(records=1, claims=1, crashes=1, alone=1),
    ),
    "disks": new_world(2, left=NONE._replace(records=2, claims=3, changes=2, crashes=1, losses=1)),
    "collected": new_world(
        left=NONE._replace(records=3, claims=4, changes=2, collections=3, resignations=1)
    ),
    "moves": new_world(
        left=NONE._replace(records=3, claims=4, changes=3, reassignments=3, hints=4)
    ),
    "fences": after(
        new_world(2, min_in_sync=1, in_sync="A", with_store=True),
        *LED,
        left=NONE._replace(records=3, claims=1, wal_objects=3, fences=5, offloads=1),
    ),
    "tails": after(
        new_world(2, min_in_sync=1, with_store=True),
        *LED,
        left=NONE._replace(records=2, claims=2, changes=2, wal_objects=1, crashes=1, losses=1),
    ),
    "trims with the bucket": after(
        new_world(2, min_in_sync=1, in_sync="A", with_store=True),
        *TRIMMABLE,
        left=NONE._replace(claims=1, trims=1, wal_objects=1, fences=2, offloads=1),
    ),
    "a late trim": after(
        new_world(2, min_in_sync=1, in_sync="A", with_store=True),
        *(*TRIMMABLE, "write_wal A", "land_wal", "begin_reading B", "list_wal B"),
        left=NONE._replace(claims=1, trims=1, wal_objects=1, fences=2, offloads=1),
    ),
    "out of order": after(
        new_world(2, min_in_sync=1, in_sync="A", with_store=True),
        *(*LED, *WRITTEN, *WRITTEN),
        left=NONE._replace(claims=1, fences=4),
    ),
    "two chains": after(
        new_world(2, min_in_sync=1, in_sync="A", with_store=True),
        *(*LED, *WRITTEN, "land_wal", "read_wal A", "advance A", "begin_reading B", "list_wal B"),
        left=NONE._replace(records=1, claims=2, changes=2, wal_objects=2, fences=2),
    ),
    "adopted": after(
        new_world(2, min_in_sync=1, in_sync="A", replicas="A", with_store=True),
        *(*LED, *WRITTEN),
        left=NONE._replace(
            records=2, claims=3, changes=2, wal_objects=2, fences=3, crashes=1, reassignments=1
        ),
    ),
    "chains": new_world(
        2,
        left=NONE._replace(records=4, claims=5, changes=2, wal_objects=5, fences=3, crashes=1),
        min_in_sync=1,
        with_store=True,
    ),
}

CAUGHT_BY: dict[str, tuple[str, int]] = {
    "the watermark counts the new set only": ("changes", 55),
    "the watermark counts the old set only": ("changes", 59),
    "the watermark is what the leader flushed": ("changes", 0),
    "a 404 is taken for the loss of what was sent": ("changes", 2218),
    "what was sent is taken for done": ("changes", 6),
    "a replica joins that lacks what the leader began with": ("collected", 74),
    "a replica joins that lacks a trim": ("trims", 225),
    "the set shrinks below the minimum": ("moves", 3),
    "a trim is answered when the leader made it": ("trims", 15),
    "acknowledgements of an earlier epoch count": ("claims", 15),
    "a fetch acknowledges what has yet to be cut": ("claims", 20),
    "a follower acknowledges before it has flushed": ("claims", 20),
    "a linearizable read is confirmed by a look at the bucket": ("reads", 881),
    "a linearizable read counts fetches that began before it": ("reads", 881),
    "a replica outside the set claims": ("claims", 6),
    "PUT without a condition": ("claims", 30),
    "a PUT is not confirmed by a LIST": ("asleep", 1612),
    "a new leader cuts its log": ("claims", 50),
    "a follower cuts its log at its own watermark": ("claims", 133),
    "a follower cuts nothing": ("disks", 63),
    "a replica follows an epoch below the one that it has seen": ("moves", 1788),
    "a leader does not claim anew when a higher epoch was seen": ("changes", 1),
    "another disk has the old replica id": ("disks", 38),
    "a replica that is added again has its old id and forgot what it saw": ("moves", 243),
    "what is sent is recorded when it is decided": ("alone", 41),
    "a restart forgets what a former life sent": ("given away", 2),
    "a look before the PUT lands forgets what was sent": ("given away", 2),
    "a version that is deleted while it is read is taken for a void one": ("collected", 1),
    "a replica that gives up its log keeps its id": ("anew", 24),
    "a leader that began in the middle does not know the epochs below": ("tiers", 524),
    "what is above the watermark is offloaded": ("deposed", 10),
    "the manifest is claimed under an epoch that nobody was elected for": ("deposed", 57),
    "the manifest is claimed under an epoch below the one in force": ("deposed", 87),
    "what was sent to the manifest is deleted before it is read back": ("deposed", 10),
    "no fence": ("fences", 44),
    "no LIST after the fence": ("fences", 1182),
    "the fence goes above the highest number, whatever is missing below": ("out of order", 1246),
    "numbers below the lowest listed are taken for collected": ("out of order", 2515),
    "a fence is collected": ("fences", 899),
    "a chain's highest object is collected": ("fences", 2201),
    "the writer takes the next free number": ("chains", 3715),
    "an object is acknowledged before it is read back": ("fences", 1),
    "a claim keeps the bucket in the set without the log's tail": ("tails", 3912),
    "the manifest is read before the last LIST of the chain": ("fences", 968),
    "slices of another epoch are of the bucket's log": ("chains", 290),
    "a trim is the bucket's once the manifest has it": ("a late trim", 773),
    "who claims for the bucket does not take its log start": ("trims with the bucket", 878),
    "what a chain has counts before the version that names it": ("two chains", 174),
}
"""The scenario that catches each bug, and the seed of a walk that does."""

SMALL: dict[str, tuple[World, int, bool]] = {
    "two brokers, both needed": (
        new_world(2, left=NONE._replace(records=1, claims=2, changes=1)),
        2,
        True,
    ),
    "two brokers, one needed": (
        new_world(2, left=NONE._replace(records=1, claims=2, changes=1), min_in_sync=1),
        2,
        False,
    ),
    "two brokers, one of which dies": (
        new_world(
            2, left=NONE._replace(records=1, claims=2, changes=1, crashes=1, alone=1), min_in_sync=1
        ),
        2,
        False,
    ),
    "two brokers, three epochs": (
        new_world(2, left=NONE._replace(records=2, claims=3, changes=1)),
        3,
        False,
    ),
    "two brokers, both chains": (
        new_world(
            2, left=NONE._replace(records=1, claims=2, offloads=2, deletions=1), min_in_sync=1
        ),
        2,
        False,
    ),
    "three brokers": (new_world(left=NONE._replace(records=1, claims=2, changes=1)), 2, False),
}
"""Worlds, up to which epoch, and whether a search of all that may happen there is quick."""
