"""Kafka's cleaner and ours on copies of the same folders, compared batch by batch.

Only the bytes of compressed batches may differ. Our cleaner runs at the time of Kafka's, which is
read from the delete horizons that Kafka set.
"""

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.fakes.clock import Clock
from tests.fakes.partition_logs import TOPIC_ID
from tests.fakes.real_kafka import complaints
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Append
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.checkpoint_files import format_topic_id, parse_partition_metadata
from tierlog.record_format.compaction import make_key_table
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.produced import ProduceLimits, check_produced

pytestmark = pytest.mark.kafka

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kafka" / "before-clean"
RETENTION_MS = 3_600_000
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": 1 << 20,
    "delete.retention.ms": RETENTION_MS,
    "min.cleanable.dirty.ratio": 0.0,
}


def write_log(folder: Path) -> None:
    """Write a log with few keys, tombstones, several producers, and all codecs."""
    rng, now_ms = random.Random(4), time.time_ns() // 1_000_000
    config = LogConfig.parse({"segment.bytes": 8192})
    log = open_log(folder, Clock(now_ms), config=config, topic_id=TOPIC_ID, clean=True)
    sequences: dict[int, int] = {}
    for number in range(120):
        count = rng.choice((1, 2, 5, 20))
        fields: dict = {}
        if number % 3:
            producer = rng.randint(1, 6)
            fields = {"producer_id": producer, "producer_epoch": 0}
            fields["base_sequence"] = sequences.get(producer, 0)
            sequences[producer] = fields["base_sequence"] + count
        batch = encode_batch(
            [rng.choice((None, b"", rng.randbytes(rng.randint(1, 90)))) for _ in range(count)],
            keys=[b"key-%d" % rng.randint(0, 60) for _ in range(count)],
            headers=[rng.choice(((), (("h", b"1"), ("h", None)))) for _ in range(count)],
            timestamps=[now_ms - rng.randint(0, 9999) for _ in range(count)],
            codec=rng.choice((0, 0, 1, 2, 3, 4)),
            **fields,
        )
        produced = check_produced(batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=now_ms))
        (outcome,) = log.writer.append([Append(produced)])
        assert not isinstance(outcome, Exception), outcome
    log.close()


def open_log(folder: Path, clock: Clock, *, config: LogConfig, topic_id: str, clean: bool):
    return PartitionLog.open(
        folder,
        topic=folder.name.rpartition("-")[0],
        partition=0,
        topic_id=topic_id,
        config=config,
        clock=clock,
        request=OpenRequest(clean=clean, recovery_point=1 << 40),
    )


def batches(folder: Path):
    """By base offset: segment, header (without CRC and size if compressed), and records."""
    found = {}
    for log in sorted(folder.glob("*.log")):
        data = log.read_bytes()
        for header in iter_headers(data):
            records = decode_batch(data, header)
            header = header._replace(position=0)
            if header.codec:
                header = header._replace(crc=0, size_bytes=0)
            found[header.base_offset] = (int(log.stem), header, records)
    return found


def test_both_cleaners_produce_the_same_batches(kafka, tmp_path):
    source = tmp_path / "source"
    folders = {path.name: path for path in FIXTURES.glob("compacted-*-0") if path.is_dir()}
    write_log(source / "ours-0")
    folders["ours-0"] = source / "ours-0"
    actives = {
        name: max(int(path.stem) for path in folder.glob("*.log"))
        for name, folder in folders.items()
    }
    topics = {name.rpartition("-")[0]: CONFIG for name in folders}
    prepared = kafka.prepare(folders, tmp_path / "kafka", topics=topics)
    seen = kafka.serve(folders, prepared, cleaned_to=actives)
    for name, folder in folders.items():
        theirs = batches(seen.folder / name)
        horizons = {h.base_timestamp for _, h, _ in theirs.values() if h.has_delete_horizon}
        assert len(horizons) == 1, "a single round of Kafka's cleaner"
        ours_folder = tmp_path / "ours" / name
        shutil.copytree(folder, ours_folder)
        clock = Clock(horizons.pop() - RETENTION_MS)
        metadata = (folder / "partition.metadata").read_bytes()
        log = open_log(
            ours_folder,
            clock,
            config=LogConfig.parse(CONFIG),
            topic_id=format_topic_id(parse_partition_metadata(metadata)),
            clean=False,
        )
        if name != "ours-0":  # Kafka expires producers by the time of their records: 2023
            log.expire_producers(idle_ms=0)
        assert log.sealed.clean(log.sealed.cleanable(None), make_key_table(1 << 20)).complete
        log.close()
        ours = batches(ours_folder)
        assert ours.keys() == theirs.keys(), name
        for offset, batch in ours.items():
            assert batch == theirs[offset], f"{name} at {offset}"
    files = [*tmp_path.glob("ours/*/*.log"), *tmp_path.glob("ours/*/*index")]
    assert complaints(kafka.dump(files), gaps_are_valid=True) == []
