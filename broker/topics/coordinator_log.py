"""A coordinator's internal topic: which of its partitions are here, and what they say.

* A key (a group, a transactional id) has one partition, found by its hash; whoever leads that
  coordinates it. In a cluster partitions come and go one by one.
* `load` takes in what one partition says, `forget` drops it: each partition is loaded once when it
  comes, and forgotten before another of its number is loaded. The others' keys do not notice.
* Until it is loaded, calls for its keys raise Starting. A partition counts as loaded after all of
  it was taken in, and no longer does before any of it is dropped.
* A new leader of replicas loads nothing before it knows where what was committed ends: what it
  left out would be gone, although it was acknowledged.

Thread-safe. What loads may block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Final

from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.broker.topics.topics import Topic
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.host.latency_histogram import LatencyHistogram
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format.batch import check_crc, iter_headers
from tierlog.record_format.consumer_offsets import partition_for_group
from tierlog.record_format.decode import Record, decode_batch
from tierlog.record_format.errors import (
    OffsetTrimmed,
    Starting,
    TierlogError,
    UnknownTopic,
    WatermarkUnknown,
)
from tierlog.record_format.produced import build_produced

MAX_LOAD_WAIT_S: Final = 5.0
WINDOW_BYTES: Final = 1 << 20

IsGone = Callable[[str], bool]
"""Whether a key's partition is not here any more."""


class CoordinatorLog:
    """`load` raises what reads raise; `forget` does not wait."""

    def __init__(
        self,
        topics: LiveTopics,
        wanted: NewTopic,
        *,
        load: Callable[[Partition], None],
        forget: Callable[[IsGone], None],
        clock: Callable[[], int],
    ) -> None:
        """`wanted`: as it is created."""
        self._topics, self._wanted, self.name, self._clock = topics, wanted, wanted.name, clock
        self._load, self._forget = load, forget
        self._loaded: dict[int, Partition] = {}  # replaced, so that it may be looked at any time
        self.load_times = LatencyHistogram()
        self._lock = threading.Lock()
        self._settling: dict[int, threading.Lock] = {}

    # --- the topic --------------------------------------------------------------------------------

    @property
    def topic(self) -> Topic | None:
        """None until it is created."""
        try:
            return self._topics.find(self.name)
        except UnknownTopic:
            return None

    def ensure_topic(self) -> Topic:
        """Raises what creating a topic does."""
        return self._topics.ensure(self._wanted)

    def home(self, key: str) -> Partition:
        """The partition of a key. Raises UnknownTopic, NotLeader, LeaderUnknown, and what a damaged
        partition does.
        """
        topic = self._topics.find(self.name)
        return topic.partition(home_number(key, topic))

    def append(self, key: str, rows: Sequence[tuple[bytes, bytes | None]]) -> Future[AppendResult]:
        """Queue records of a key, keys and values, all or none. Raises what `home` does."""
        return append_records(self.home(key), rows, now_ms=self._clock())

    # --- what is loaded ---------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether all that is here is, and nothing else."""
        topic = self.topic
        if topic is None:
            return not self._loaded
        return not topic.damaged and self._loaded == topic.partitions

    def count_by_state(self) -> dict[str, int]:
        """How many of its partitions are here, by Kafka's name of what they are in."""
        topic, loaded = self.topic, len(self._loaded)
        if topic is None:
            return {"active": 0, "loading": 0, "failed": 0}
        loading = max(0, len(topic.partitions) - loaded)
        return {"active": loaded, "loading": loading, "failed": len(topic.damaged)}

    def load(self) -> None:
        """Load all that is here, and forget what is not. Raises the first error once all were
        tried: Starting, StoreUnavailable, CorruptDataError, what a damaged partition does.
        """
        if self.is_loaded:
            return
        topic, failures = self.topic, DeferredErrors(TierlogError, OSError)
        for number in {*self._loaded, *_numbers_here(topic)}:
            with failures:
                self._settle(number)
        failures.raise_first()

    def is_ready_for(self, key: str) -> bool:
        """Whether calls for the key need not wait here, where it is coordinated or not; else
        `prepare_for` first.
        """
        topic = self.topic
        if topic is None:
            return False
        number = home_number(key, topic)
        return self._loaded.get(number) is topic.partitions.get(number)

    def prepare_for(self, key: str) -> None:
        """Create the topic, and load the key's partition, if it is here. Raises as `load`, and what
        creating a topic does.
        """
        self.ensure_topic()
        self.load_home(key)

    def load_home(self, key: str) -> None:
        """As `prepare_for`, but creates nothing."""
        topic = self.topic
        if topic is not None and not self.is_ready_for(key):
            self._settle(home_number(key, topic))

    def _settle(self, number: int) -> None:
        with self._lock:
            settling = self._settling.setdefault(number, threading.Lock())
        if not settling.acquire(timeout=MAX_LOAD_WAIT_S):
            raise Starting(f"{self.name}-{number} is still being loaded")
        try:
            topic, known = self.topic, self._loaded.get(number)
            here = None if topic is None else topic.partitions.get(number)
            if topic is not None and number in topic.damaged:
                raise topic.damaged[number].error()
            if known is not here and known is not None:
                self._replace(number, None)
                self._forget(lambda key: topic is None or home_number(key, topic) == number)
            if known is not here and here is not None:
                self._check_end_known(here)
                began_s = time.monotonic()
                self._load(here)
                self.load_times.observe(time.monotonic() - began_s)
                self._replace(number, here)
        finally:
            settling.release()

    def _check_end_known(self, here: Partition) -> None:
        try:
            here.check_end_known()
        except WatermarkUnknown as error:
            raise Starting(str(error)) from error

    def _replace(self, number: int, partition: Partition | None) -> None:
        with self._lock:
            others = {n: one for n, one in self._loaded.items() if n != number}
            self._loaded = others if partition is None else {**others, number: partition}

    # --- whose a key is ---------------------------------------------------------------------------

    def check_here(self, key: str) -> None:
        """Raises NotLeader or LeaderUnknown if another broker of the cluster coordinates it,
        FencedError if another owner has its partition. Before there is a topic it is here.
        """
        if self.topic is not None:
            self.home(key).check_leadership()

    def confirm_here(self, key: str) -> Future[None]:
        """Completes once nobody else can have coordinated the key when this was called
        (`Partition.confirm_leads`). Does not wait. Raises as `home`.
        """
        return self.home(key).confirm_leads()

    def check_ready(self, key: str) -> None:
        """As `check_here`; and Starting, if there is no topic, or the partition is not loaded:
        `prepare_for` first.
        """
        if self.topic is None:
            raise Starting(f"there is no {self.name} yet")
        self.check_loaded(self.home(key))

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """What is found or refused meanwhile counts only if the key's partition was here, and
        loaded, from the beginning to the end. Raises as `check_ready`; nothing without a topic.
        """
        if self.topic is None:
            yield
            return
        home = self.home(key)
        self.check_loaded(home)
        try:
            yield
        finally:
            self.check_loaded(home)

    def check_loaded(self, home: Partition) -> None:
        """Raises FencedError, NotLeader, LeaderUnknown, Starting."""
        home.check_leadership()  # a new owner has newer records
        if self._loaded.get(home.number) is not home:
            raise Starting(f"{home} is still being loaded")


def _numbers_here(topic: Topic | None) -> Iterable[int]:
    return () if topic is None else (*topic.partitions, *topic.damaged)


# --- its records ----------------------------------------------------------------------------------


def append_records(
    home: Partition, rows: Sequence[tuple[bytes, bytes | None]], *, now_ms: int
) -> Future[AppendResult]:
    """Queue records of a coordinator, keys and values, all or none."""
    batches = build_produced(
        [value for _, value in rows],
        keys=[key for key, _ in rows],
        timestamps=[now_ms] * len(rows),
        max_message_bytes=home.config.max_message_bytes,
    )
    return home.append(batches, acks=Acks.ALL)


def home_number(group: str, topic: Topic) -> int:
    """The partition that Kafka would choose; if an adopted folder lacks it, the first it has."""
    wanted = partition_for_group(group, topic.record.partitions)
    return wanted if wanted in topic.numbers else topic.numbers[0]


def home_partition(group: str, topic: Topic) -> Partition:
    """Raises NotLeader or LeaderUnknown if it is elsewhere in the cluster."""
    return topic.partition(home_number(group, topic))


def stored_batches(partition: Partition) -> Iterator[bytes]:
    """A partition's whole log, in windows. May block; raises what reads raise."""
    offset = partition.offsets().log_start_offset
    while offset < partition.offsets().high_watermark:
        try:
            fetched = partition.read(offset, max_bytes=WINDOW_BYTES)
        except OffsetTrimmed as trimmed:
            offset = trimmed.log_start_offset
            continue
        with closing(fetched):
            yield b"".join(piece.read() for piece in fetched.slices)
        if fetched.next_offset <= offset:
            return  # compaction removed the last records
        offset = fetched.next_offset


def stored_records(partition: Partition) -> Iterator[Record]:
    """Those of a coordinator's partition, in the log's order. Raises what `stored_batches` does,
    and CorruptBatch.
    """
    for data in stored_batches(partition):
        yield from records_of(data)


def records_of(data: bytes) -> Iterator[Record]:
    """Those of whole batches, without control records. Raises CorruptBatch."""
    for header in iter_headers(data):
        check_crc(data, header)
        if not header.is_control:
            yield from decode_batch(data, header)
