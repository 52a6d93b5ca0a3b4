"""A sealed segment that rots before it went up: it is told, and repaired without losing more than
what does not check, or giving an offset again.
"""

import struct

import pytest

from hot_tier.append import Acks
from record_format.errors import CorruptDataError, StoreUnavailable
from tests.fakes.bad_sectors import cannot_read
from tests.fakes.damage import flip
from tests.integration.broker.test_verify import path_of

BATCHES, EACH = 10, 3


@pytest.fixture
def house(house):
    """`t-0`: a sealed segment of offsets 0 to 29 in batches of three, which is not in the bucket,
    and one more that holds 30 to 32.
    """
    house.broker.create_topic("t", config={"retention.ms": -1})
    house.stop_copying()
    for number in range(BATCHES):
        house.produce("t", [b"%d-%d" % (number, n) for n in range(EACH)])
    house.broker.partition("t", 0).log.roll()
    house.produce("t", [b"behind"] * EACH)
    house.broker.partition("t", 0).log.roll()
    return house


def log_of(house):
    return house.root / "data" / "t-0" / f"{0:020d}.log"


def positions(house):
    data, found = log_of(house).read_bytes(), [0]
    while found[-1] < len(data):
        found.append(found[-1] + 12 + struct.unpack_from(">i", data, found[-1] + 8)[0])
    return found


def damage(house, *patches):
    """(position, bytes): written over what is there."""
    data = bytearray(log_of(house).read_bytes())
    for position, patch in patches:
        data[position : position + len(patch)] = patch
    log_of(house).write_bytes(data)
    return bytes(data)


def repaired(house, **how):
    (step,) = house.broker.repair("t", apply=True, **how)
    return step


def all_but(*batches):
    return [one for n in range(BATCHES + 1) if n not in batches for one in range(3 * n, 3 * n + 3)]


def rotten_record(at):
    return [(at[4] + 70, b"\xff")], (4,)


def rotten_length(at):
    return [(at[4] + 8, b"\0\0\1\0")], (4,)


def rotten_length_below_a_header(at):
    return [(at[0] + 8, b"\0\0\0\1")], (0,)


def rotten_offset_that_leaps_ahead(at):
    return [(at[4] + 7, b"\x0f")], (4,)  # 15 to 17 where 12 to 14 were


def rotten_offset_that_falls_back(at):
    return [(at[4] + 7, b"\x01")], (4,)


def offset_falls_back_behind_what_is_gone(at):
    return [(at[3] + 70, b"\xff"), (at[5] + 7, b"\x0d")], (3, 5)  # 13 to 15, not 15 to 17


def zeroed_page_over_batches(at):
    return [(at[4] + 30, bytes(at[6] - at[4]))], (4, 5, 6)


def rotten_at_the_end(at):
    return [(at[9] + 70, b"\xff")], (9,)


def rotten_throughout(at):
    return [(position + 62, b"\xff") for position in at[:-1]], tuple(range(10))


@pytest.mark.parametrize(
    "rot",
    [
        rotten_record,
        rotten_length,
        rotten_length_below_a_header,
        rotten_offset_that_leaps_ahead,
        rotten_offset_that_falls_back,
        offset_falls_back_behind_what_is_gone,
        zeroed_page_over_batches,
        rotten_at_the_end,
        rotten_throughout,
    ],
)
def test_exactly_what_does_not_check_is_dropped_and_offload_goes_on(house, rot):
    before = house.records("t")
    patches, lost = rot(positions(house))
    rotten = damage(house, *patches)
    partition = house.broker.partition("t", 0)
    step = repaired(house, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True), step
    kept = house.records("t")
    assert [one.offset for one in kept] == all_but(*lost)
    assert kept == [one for one in before if one.offset // 3 not in lost]
    assert (house.broker.folder.damaged / "t-0-0" / log_of(house).name).read_bytes() == rotten
    house.copy_sealed()
    assert partition.cold.end_offset == 33
    assert partition.cold.manifest.compacted_before == 0
    assert house.broker.verify("t", deep=True).ok
    assert house.broker.repair("t", deep=True) == []
    partition.log.delete_local(33)
    assert house.records("t") == kept
    assert house.produce("t", [b"new"]).base_offset == 33
    house.restart()
    assert [one.offset for one in house.records("t")] == [*all_but(*lost), 33]


def unreachable():
    raise StoreUnavailable("down")


def test_it_is_told_until_it_is_repaired(house, monkeypatch):
    damage(house, (positions(house)[4] + 70, b"\xff"))
    house.copy_sealed()
    assert house.broker.partition("t", 0).cold.end_offset == 0
    (told,) = house.broker.readiness().degraded
    assert "t-0" in told
    assert log_of(house).name in told
    assert "storage repair --deep" in told
    assert house.broker.readiness().reasons == [], "the partition serves"
    partition = house.broker.partition("t", 0)
    with monkeypatch.context() as down:
        down.setattr(partition.cold, "resolve_failed_commit", unreachable)
        house.copy_sealed()
    assert house.broker.readiness().degraded == [told], "nobody looked"
    rotten = log_of(house).read_bytes()
    (step,) = house.broker.repair("t")
    assert not repaired(house).done, "a loss is to be accepted"
    assert "offsets 12 to 14 are lost, all others are kept; requires --accept-loss" in step.detail
    assert log_of(house).read_bytes() == rotten
    assert repaired(house, accept_loss=True).detail.endswith("all others are kept")
    house.copy_sealed()
    assert house.broker.readiness().degraded == []


def test_a_batch_inside_a_record_is_not_taken_for_one_of_the_log(house):
    """What is behind a bad length is searched for: a record may hold a batch."""
    data, at = log_of(house).read_bytes(), positions(house)
    partition = house.broker.partition("t", 0)
    inner = bytearray(data[at[4] : at[5]])
    inner[7] = 34  # a good batch of offsets 34 to 36
    house.produce("t", [bytes(inner)])
    house.produce("t", [b"a"] * 3)
    partition.log.roll()
    house.produce("t", [b"b"])
    bad = log_of(house).with_name(f"{33:020d}.log")
    patched = bytearray(bad.read_bytes())
    patched[8:12] = b"\0\0\1\0"
    bad.write_bytes(patched)
    house.copy_sealed()
    assert repaired(house, accept_loss=True).done
    assert [one.value for one in house.records("t", offset=33)] == [b"a", b"a", b"a", b"b"]


def test_where_the_bucket_has_it_the_disk_lets_it_go(house):
    before = house.records("t")
    house.copy_sealed()
    damage(house, (positions(house)[4] + 70, b"\xff"))
    assert house.broker.repair("t") == [], "only a deep look reads what went up"
    assert repaired(house, deep=True).action == "set-aside"
    assert house.broker.partition("t", 0).log.first_local_offset == 30
    assert house.records("t") == before
    assert house.broker.verify("t", deep=True).ok


def test_one_that_was_sealed_by_an_append_that_nobody_waited_for_goes_too(house):
    """Its seal is flushed first."""
    house.broker.alter_topic("t", config={"segment.bytes": 1024, "flush.ms": 86_400_000})
    house.produce("t", [b"flushed"])
    house.produce("t", [b"of the next" * 100], acks=Acks.LEADER)
    log = house.copy_sealed().log
    assert (log.high_watermark, log.active_base_offset) == (34, 34)
    flip(log_of(house).with_name(f"{33:020d}.log"), 70)
    assert repaired(house, deep=True).action == "set-aside"
    assert log.first_local_offset == 34
    assert house.broker.verify("t", deep=True).ok


def test_where_the_bucket_has_it_no_more_than_the_disk_it_stays(house):
    house.copy_sealed()
    (entry, _) = list(house.broker.partition("t", 0).cold.entries(0))
    damage(house, (positions(house)[4] + 70, b"\xff"))
    path_of(house, entry.log_key).write_bytes(log_of(house).read_bytes())
    steps = [(one.action, one.done) for one in house.broker.repair("t", deep=True)]
    assert steps == [("drop-batches", False), ("none", False)]


def test_one_behind_it_takes_nothing_from_the_disk_that_the_bucket_lacks(house):
    house.copy_sealed()
    (entry, _) = list(house.broker.partition("t", 0).cold.entries(0))
    damage(house, (positions(house)[4] + 70, b"\xff"))
    path_of(house, entry.log_key).write_bytes(log_of(house).read_bytes())
    behind = log_of(house).with_name(f"{30:020d}.log")
    behind.write_bytes(behind.read_bytes()[:-1] + b"\xff")
    steps = house.broker.repair("t", deep=True, apply=True)
    assert [one.action for one in steps] == ["drop-batches", "none", "none"]
    assert f"but not all of {log_of(house).name}" in steps[-1].detail
    assert house.broker.partition("t", 0).log.first_local_offset == 0


def test_of_a_compacted_topic_it_comes_back_from_the_bucket(house):
    house.broker.alter_topic("t", config={"cleanup.policy": "compact"})
    before = house.records("t")
    house.copy_sealed()
    damage(house, (positions(house)[4] + 70, b"\xff"))
    assert repaired(house, deep=True).action == "set-aside"
    assert house.broker.partition("t", 0).log.first_local_offset == 30
    house.broker.background.compactor._rehydrate_all()
    assert house.broker.partition("t", 0).log.first_local_offset == 0
    assert house.records("t") == before
    assert house.broker.repair("t", deep=True) == []


def test_of_a_topic_without_a_bucket_exactly_what_does_not_check_is_dropped(house):
    house.broker.alter_topic("t", config={"remote.storage.enable": False})
    house.restart()
    assert house.broker.partition("t", 0).cold is None
    damage(house, (positions(house)[4] + 70, b"\xff"))
    with pytest.raises(CorruptDataError):
        house.records("t")
    assert not repaired(house, deep=True).done, "a loss is to be accepted"
    assert repaired(house, deep=True, accept_loss=True).action == "drop-batches"
    assert [one.offset for one in house.records("t")] == all_but(4)
    assert house.broker.verify("t", deep=True).ok


@pytest.mark.parametrize("in_bucket", [True, False])
def test_what_the_disk_cannot_read_does_not_check(house, monkeypatch, in_bucket):
    """A sector in the middle of the fifth batch."""
    house.broker.create_topic("u", config={"retention.ms": -1})
    for number in range(BATCHES):
        house.produce("u", [b"%d" % number * 3000] * EACH)
    partition = house.broker.partition("u", 0)
    partition.log.roll()
    if in_bucket:
        house.copy_sealed()
    before, path = house.records("u"), partition.log.segments()[0].path
    written = path.read_bytes()
    with monkeypatch.context() as disk:
        bad = range(10 * 4096, 11 * 4096)
        cannot_read(disk, path, kept=house.root / "kept", where=bad)
        (step,) = house.broker.repair("u", apply=True, deep=True, accept_loss=True)
        assert step.action == ("set-aside" if in_bucket else "drop-batches"), step
        lost = () if in_bucket else range(12, 15)
        assert house.records("u") == [one for one in before if one.offset not in lost]
    (aside,) = (house.root / "data" / "tierlog" / "damaged").glob(f"u-0-*/{path.name}")
    evidence = bytearray(written)
    evidence[bad.start : bad.stop] = bytes(4096)
    assert aside.read_bytes() == evidence
