"""What today's tree writes opens in the last release, and what that writes opens in today's, until
`storage finalize`. Each runs in its own process, in turn, over one folder and one bucket. Today's
has a format level that only this test knows.
"""

import pytest

from tests.fakes.last_release import last_release, this_tree
from tests.fakes.snapshot import snapshot
from tests.fakes.waiting import until
from tierlog import NewRecord, OffsetCommit, ProducerIdentity, Sequenced

NEXT_LEVEL = "from tierlog.record_format.format_level import LEVELS; LEVELS[2] = '0.2.0'\n"
ORDERS = {"segment.bytes": 1024, "local.retention.bytes": 1024, "retention.ms": -1}
USERS = {"segment.bytes": 1024, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
PRODUCER = ProducerIdentity(producer_id=1 << 33, producer_epoch=0)


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    return last_release(tmp_path_factory.mktemp("last-release"))


class Folder:
    """A data folder and a bucket, and all that was acknowledged there."""

    def __init__(self, root):
        self.root = root
        self.bucket = ("--store", f"file://{root}/bucket")
        self.flags = ("--data-dir", root / "data", *self.bucket, "--log-cleaner-backoff-ms", 50)
        self.orders = {0: [], 1: []}
        self.users = {}
        self.group = {}

    def serving(self, tree):
        return tree.serving(*self.flags, cwd=self.root)

    def run(self, tree, *arguments):
        return tree.run(*arguments, cwd=self.root)

    def create(self, client):
        client.create_topic("orders", partitions=2, config=ORDERS)
        client.create_topic("users", config=USERS)

    def write(self, client, mark):
        """Rolls, offloads, compacts, and commits offsets."""
        for number in range(200):
            partition, value = number % 2, f"order {number} of {mark}".encode()
            self.orders[partition].append(value)
        for partition, values in self.orders.items():
            new = values[-100:]
            for at in range(0, 100, 20):
                client.produce_encoded("orders", new[at : at + 20], partition=partition)
        for round_number in range(3):
            self.users |= {b"user-%d" % n: f"{mark} {round_number}".encode() for n in range(40)}
            records = [NewRecord(value, key=key) for key, value in self.users.items()]
            client.produce_encoded("users", records, partition=0)
        client.offload("orders", wait_ms=30_000)
        until(lambda: is_compacted(client))
        client.offload("users", wait_ms=30_000)
        self.group = {0: len(self.orders[0]) - 3, 1: len(self.orders[1]) - 5}
        client.commit_offsets(
            "readers", [OffsetCommit("orders", *place) for place in self.group.items()]
        )

    def produce_once(self, client):
        """A record of an idempotent producer; a repeat gives the offset of the first."""
        done = client.produce("orders", ["once"], partition=1, sequenced=Sequenced(PRODUCER, 0))
        return done.results[0].base_offset

    def check(self, client):
        """All that was acknowledged is there, and every byte of both tiers is good."""
        assert client.readiness() == (True, (), ())
        for partition, values in self.orders.items():
            found = list(client.consume("orders", partitions=[partition]))
            assert [record.value for record in found] == values
            assert [record.offset for record in found] == list(range(len(values)))
        assert {one.key: one.value for one in client.consume("users")} == self.users
        offsets = client.group("readers").offsets
        assert {one.partition: one.offset for one in offsets} == self.group
        for topic in ("orders", "users"):
            report = client.verify(topic, deep=True)
            assert report["ok"], report["problems"]
        assert {one.tier for one in client.segments("orders", 0)} >= {"cold"}


def is_compacted(client):
    return sum(one.records for one in client.segments("users", 0)) < 120


def test_the_last_release_and_todays_tree_serve_one_folder_in_turn(older, tmp_path):
    newest, folder = this_tree(first=NEXT_LEVEL), Folder(tmp_path)
    with folder.serving(newest) as client:
        folder.create(client)
        folder.write(client, "newest")
        offset = folder.produce_once(client)
        folder.orders[1].append(b"once")
    pinned = folder.run(newest, "storage", "pin", "orders", "june", *folder.bucket)
    assert pinned.returncode == 0, pinned.stderr
    with folder.serving(older) as client:
        folder.check(client)
        assert folder.produce_once(client) == offset, "the older knows the newest's producers"
        folder.write(client, "older")
    pins = folder.run(older, "storage", "pins", "orders", *folder.bucket)
    assert '"june"' in pins.stdout
    restored = folder.run(
        older, "storage", "restore", "--data-dir", tmp_path / "restored", *folder.bucket
    )
    assert restored.returncode == 0, restored.stderr
    with folder.serving(newest) as client:
        folder.check(client)
        assert folder.produce_once(client) == offset
        folder.write(client, "newest again")
        folder.check(client)
    with folder.serving(older) as client:
        folder.check(client)


def test_a_folder_that_the_last_release_made_is_upgraded_finalized_and_then_refused_by_it(
    older, tmp_path
):
    newest, folder = this_tree(first=NEXT_LEVEL), Folder(tmp_path)
    with folder.serving(older) as client:
        folder.create(client)
        folder.write(client, "older")
    finalize = ("storage", "finalize", "--data-dir", tmp_path / "data", *folder.bucket)
    before = snapshot(tmp_path)
    tried = folder.run(newest, *finalize, "--dry-run", "--output", "text")
    assert tried.returncode == 0, tried.stderr
    assert "tierlog older than 0.2.0 would no longer open" in tried.stderr
    assert snapshot(tmp_path) == before
    with folder.serving(older) as client:
        folder.check(client)
    done = folder.run(newest, *finalize, "--output", "text")
    assert done.returncode == 0, done.stderr
    assert "format level 2: tierlog older than 0.2.0 no longer opens" in done.stderr

    before = snapshot(tmp_path)
    new = ("--data-dir", tmp_path / "new", *folder.bucket)
    for command in (
        ("serve", "--listen", "127.0.0.1:0", *folder.flags),
        ("storage", "restore", *new),
        finalize,
        ("storage", "repair", "orders", "--apply", *finalize[2:]),
    ):
        refused = folder.run(older, *command)
        assert refused.returncode == 1, refused.stderr
        line = refused.stderr.splitlines()[-1]
        assert "format level 2, which tierlog 0.2.0 and newer read" in line
    assert snapshot(tmp_path) == before

    with folder.serving(newest) as client:
        folder.check(client)
        folder.write(client, "newest")
        folder.check(client)
    again = folder.run(newest, *finalize, "--output", "text")
    assert "nothing to do" in again.stderr
