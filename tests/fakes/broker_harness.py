"""A broker without a server, and the calls that most tests make."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.fakes.faulty_object_store import FaultyObjectStore
from tests.fakes.records import iter_records
from tests.fakes.waiting import until
from tierlog.broker.background.copier import Offloaded
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.object_store.open import open_store
from tierlog.record_format.decode import Record
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.produced import ProduceLimits, build_produced, check_produced


class BrokerHarness:
    """A broker on real files with a folder as its bucket, and helpers for common calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: FaultyObjectStore | None = None
        self.broker = self.open()

    def open(self, *, down: bool = False, **settings: object) -> Broker:
        store = FaultyObjectStore(open_store(f"file://{self.root / 'bucket'}"))
        self.store = store
        self.set_down(down)
        given = BrokerSettings(
            data_dir=self.root / "data",
            cache_bytes=64 << 20,
            disk_reserve_bytes=0,
            # Tests call the compactor's rounds; one of its own at the same time would fail theirs.
            **{"log_cleaner_backoff_ms": 3_600_000, **settings},  # type: ignore[arg-type]
        )
        return Broker.open(given, store=store)

    def set_down(self, down: bool) -> None:
        """Make every call to the store fail, or none."""
        if down:
            self.store.go_down()
        else:
            self.store.heal()

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
        """Wait for background work of the broker that no call can await."""
        until(condition, patience_s=timeout_s)

    def restart(self, **settings: object) -> Broker:
        self.broker.close()
        self.broker = self.open(**settings)
        return self.broker

    def copy_to(self, root: Path) -> Path:
        """Make `root` with a copy of the data folder and the same bucket; return it."""
        shutil.copytree(self.root / "data", root / "data")
        (root / "bucket").symlink_to(self.root / "bucket")
        return root

    def produce(
        self,
        topic: str,
        values: list[bytes],
        *,
        partition: int = 0,
        at: int = 0,
        acks: Acks = Acks.ALL,
    ) -> AppendResult:
        config = self.broker.topic(topic).config
        batches = build_produced(
            values,
            timestamps=[at + i for i in range(len(values))],
            max_message_bytes=config.max_message_bytes,
        )
        future = self.broker.partition(topic, partition).append(batches, acks=acks)
        return future.result(10)

    def fill(
        self, count: int, topic: str = "t", *, mark: bytes = b"record", partition: int = 0
    ) -> list[bytes]:
        """Append numbered records of about 100 bytes in batches of ten, with timestamps that
        increase with their offsets; return their values.
        """
        start = self.broker.partition(topic, partition).offsets().log_end_offset
        values = [b"%s %d " % (mark, start + n) * 9 for n in range(count)]
        for at in range(0, count, 10):
            self.produce(topic, values[at : at + 10], partition=partition, at=start + at)
        return values

    def offload(self, topic: str = "t") -> Offloaded:
        """Upload the whole topic, including the active segments."""
        progress = self.broker.offload(topic, wait_ms=20_000)
        assert progress.remaining_segments == 0
        return progress

    def claim(self) -> None:
        """Run one round of the copier's background work, which begins with claims."""
        self.broker.background.copy_round()
        assert self.broker.background.copier.wait_until_idle(timeout_s=20)

    def stop_copying(self) -> None:
        """Stop background uploads, and wait for those in progress: the claim of a new topic may
        upload segments that are sealed meanwhile.
        """
        self.broker.background.copying.stop(10)
        assert self.broker.background.copier.wait_until_idle(timeout_s=20)

    def copy_sealed(self) -> Partition:
        """Upload sealed segments now, even without background copying, and ignore failures;
        return the first partition of `t`.
        """
        copier = self.broker.background.copier
        copier.reset_backoff(self.broker.partitions())
        copier.run_round()
        assert copier.wait_until_idle(timeout_s=20)
        return self.broker.partition("t", 0)

    def upload_sealed(self) -> None:
        """Run a round of the copier, which leaves no sealed segment."""
        copier, partitions = self.broker.background.copier, self.broker.partitions()
        copier.run_round()
        assert copier.wait_until_done(partitions, timeout_s=20)

    def produce_idempotent(self, *, sequence: int) -> AppendResult:
        """Produce one record of one producer to the first partition of `t`."""
        batch = encode_batch(
            [b"once"],
            timestamps=[1],
            producer_id=1 << 33,
            producer_epoch=0,
            base_sequence=sequence,
        )
        produced = check_produced(batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=1))
        return self.broker.partition("t", 0).append(produced, acks=Acks.ALL).result(10)

    def records(self, topic: str, *, partition: int = 0, offset: int = 0) -> list[Record]:
        """Everything from `offset` to the high watermark, read fetch by fetch."""
        log, found = self.broker.partition(topic, partition), []
        while offset < log.offsets().high_watermark:
            fetched = log.read(offset, max_bytes=64 << 10)
            data = b"".join(piece.read() for piece in fetched.slices)
            found += iter_records(data, from_offset=offset)
            assert fetched.next_offset > offset, "a fetch below the high watermark advances"
            offset = fetched.next_offset
        return found


def run_janitor(broker: Broker) -> None:
    """Run the janitor's rounds."""
    broker.background.janitor.disk_round()
    broker.background.janitor.bucket_round()


def run_copier(broker: Broker) -> None:
    """Upload everything due of all partitions now; failures are left to the next round."""
    background = broker.background
    with suppress(TierlogError, OSError):
        background.copy_round()
        background.deletions.run_round()
    background.copier.reset_backoff(broker.partitions())
    with suppress(TierlogError):
        background.copier.run_round()
    assert background.copier.wait_until_idle(timeout_s=30)
