"""The files that are derived from the batches, and rebuilt from them whenever they are bad:
indexes, transaction indexes, producer snapshots.

* What is rebuilt equals what appends wrote. All of a segment is read, which may take seconds:
  without the log's lock, or appends would wait. The result is put in place under it, if the segment
  is still there.
* `.txnindex`: the aborted transactions whose marker is in the segment; a segment without one has no
  file. Recovery and compaction write it, appends never do: there is no transaction coordinator
  here, so no markers are appended.
* `<offset>.snapshot`: the producers as they were before that offset. One is written at every roll
  and at a clean shutdown; recovery starts from the newest valid one. It keeps one batch per
  producer, as in Kafka: the older ones come from the log's last `READ_BACK_BYTES`, so that
  duplicates are recognised after a restart too. A bad one (a crash can leave zeros), or one of an
  unknown version, is removed and an older one used, which only costs a longer replay. At the log
  start there is no older one: the other tier is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

from tierlog.host.clock import monotonic_ms
from tierlog.host.disk import Disk
from tierlog.host.durable_file import read_whole, write_atomically
from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.batch_walk import batch_of, headers_of
from tierlog.hot_tier.indexes import IndexColumns
from tierlog.hot_tier.log_folder import (
    LOG,
    OFFSET_INDEX,
    SNAPSHOT,
    TIME_INDEX,
    TRANSACTION_INDEX,
    path_of,
    segment_files,
)
from tierlog.hot_tier.log_state import LogState, OpeningLog
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import (
    REMEMBERED_BATCHES,
    Producer,
    ProducerBatch,
    ProducerStates,
)
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.batch import BatchHeader, parse_header
from tierlog.record_format.batch_runs import HeaderRun
from tierlog.record_format.checkpoint_files import ProducerEntry, format_snapshot, parse_snapshot
from tierlog.record_format.decode import end_marker_of
from tierlog.record_format.errors import CorruptIndex, CorruptSnapshot, UnknownFormatVersion
from tierlog.record_format.index_builder import IndexBuilder
from tierlog.record_format.index_layouts import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    AbortedTxn,
    pack_txn_index,
    parse_txn_index,
)


def read_entries(segment: Segment) -> list[AbortedTxn]:
    """Raises CorruptIndex, and FileNotFoundError if the segment was deleted meanwhile."""
    if (active := segment.aborted) is not None:
        return active
    if not segment.has_transactions:
        return []
    path = segment.path(TRANSACTION_INDEX)
    data = read_whole(path, CorruptIndex)
    return parse_txn_index(data, base_offset=segment.base_offset, file=str(path))


def write_entries(segment: Segment, entries: list[AbortedTxn], *, disk: Disk) -> None:
    """Replace the file by `entries` unless it has them already; no file if there are none."""
    try:
        if read_entries(segment) == entries:
            return
    except (CorruptIndex, FileNotFoundError):
        pass
    path = segment.path(TRANSACTION_INDEX)
    segment.has_transactions = bool(entries)
    if entries:
        write_atomically(path, pack_txn_index(entries), disk=disk, sync=True)
    else:
        disk.unlink(path)


def replay(
    state: LogState | OpeningLog, states: ProducerStates, *, end_offset: int
) -> list[AbortedTxn]:
    """Apply the batches in [states.end_offset, end_offset) by their headers; returns the
    transactions that they abort. Raises CorruptBatch.
    """
    segments, aborted = state.segments, []
    number = max(segments.number_of(states.end_offset), 0)
    for segment in segments.items[number:]:
        if segment.base_offset >= end_offset:
            break
        with closing(segment.log_reader(state.files)) as log:
            for header in segment.headers(state.files):
                if states.end_offset <= header.base_offset < end_offset:
                    data = batch_of(log, header) if header.is_control else b""
                    if (abort := apply_batch(states, header, data)) is not None:
                        aborted.append(abort)
    states.end_offset = max(states.end_offset, end_offset)
    return aborted


def apply_batch(states: ProducerStates, header: BatchHeader, data: bytes) -> AbortedTxn | None:
    """Apply one batch; `data` is its bytes if it is a control batch. Returns the transaction that
    it aborts.
    """
    if not header.is_control:
        states.apply_data_batch(header)
        return None
    marker = end_marker_of(data, parse_header(data))
    if marker is None:
        states.end_offset = header.next_offset
        return None
    return states.apply_marker(header, marker)


class DeferredProducers:
    """Producers from runs of batches, applied late: only the last batches of each producer matter,
    whatever came before.
    """

    def __init__(self, state: OpeningLog) -> None:
        self._state = state
        self._headers: dict[int, list[bytes]] = {}

    def defer(self, run: HeaderRun) -> None:
        headers = self._headers
        for producer_id, newer in run.remembered.items():
            older = headers.get(producer_id)
            if older and len(newer) < REMEMBERED_BATCHES:
                newer = [*older, *newer][-REMEMBERED_BATCHES:]
            headers[producer_id] = newer
        self._state.producers.end_offset = run.next_offset

    def apply_deferred(self) -> None:
        """Apply them; required before any other change to the states."""
        states = self._state.producers
        end_offset = states.end_offset
        for own in self._headers.values():
            for header in own:
                states.apply_data_batch(parse_header(header))
        states.end_offset = end_offset
        self._headers.clear()


READ_BACK_BYTES: Final = 8 << 20


def write_snapshot(state: LogState | OpeningLog, offset: int, *, sync: bool = False) -> None:
    """Write the current producers, at `offset`. Raises OSError.

    The next flush syncs it together with the segment that ends there: once that segment is deleted,
    nothing else on disk has these producers.
    """
    _write(state, offset, state.producers, sync=sync)


def ensure_snapshot(state: LogState, offset: int) -> Path:
    """The path of the snapshot at `offset`. A missing or bad one is rebuilt first, from an older
    one and the batches between. Raises CorruptBatch, OSError.
    """
    path, start = path_of(state.folder, offset, SNAPSHOT), state.segments.bases[0]
    if path.exists() and _read(path) is not None:
        return path
    names = (name for name, _ in segment_files(state.folder))
    snapshots = {name.offset for name in names if name.suffix == SNAPSHOT and not name.stage}
    producers = load_newest(state, snapshots, at_most=offset, at_least=start)
    replay(state, producers, end_offset=offset)
    return _write(state, offset, producers, sync=True)


def _write(
    state: LogState | OpeningLog, offset: int, producers: Iterable[Producer], *, sync: bool
) -> Path:
    path = path_of(state.folder, offset, SNAPSHOT)
    write_atomically(path, format_snapshot(map(_to_entry, producers)), disk=state.disk, sync=sync)
    return path


def _read(path: Path) -> list[ProducerEntry] | None:
    """None if it is bad."""
    try:
        return parse_snapshot(read_whole(path, CorruptSnapshot), file=str(path))
    except (CorruptSnapshot, UnknownFormatVersion):
        return None


def load_newest(
    state: LogState | OpeningLog, offsets: set[int], *, at_most: int, at_least: int
) -> ProducerStates:
    """The states of the newest valid snapshot in [at_least, at_most]; if there is none, those that
    the other tier has at `at_least`, the log start.

    `offsets` are those of the snapshots in the folder. Bad ones are removed from the folder and
    from `offsets`; the one from the other tier is added.
    """
    for offset in sorted(offsets, reverse=True):
        if not at_least <= offset <= at_most:
            continue
        path = path_of(state.folder, offset, SNAPSHOT)
        entries = _read(path)
        if entries is None:
            state.disk.unlink(path)
            offsets.discard(offset)
            continue
        states = ProducerStates(state.monotonic_clock)
        _put_entries(states, entries, offset)
        return states
    if found := state.fetch_producer_snapshot(at_least):
        offsets.add(at_least)
    return begin_states(state, at_least, found)


def begin_states(
    state: LogState | OpeningLog, offset: int, snapshot: bytes | None
) -> ProducerStates:
    """The states at the start of a log, from a snapshot of the other tier, which is kept."""
    states = ProducerStates(state.monotonic_clock)
    states.end_offset = offset
    if snapshot:
        path = path_of(state.folder, offset, SNAPSHOT)
        _put_entries(states, parse_snapshot(snapshot, file=str(path)), offset)
        write_atomically(path, snapshot, disk=state.disk, sync=True)
    return states


def snapshot_before(folder: Path, offset: int) -> bytes:
    """The producers before `offset` in a closed log: from its newest valid snapshot up to there and
    the batches after that. Raises CorruptBatch.
    """
    states = ProducerStates(monotonic_ms)
    found = (name for name, _ in segment_files(folder))
    names = [name for name in found if name.offset <= offset and not name.stage]
    for name in reversed(names):
        path = path_of(folder, name.offset, SNAPSHOT)
        if name.suffix == SNAPSHOT and (entries := _read(path)) is not None:
            _put_entries(states, entries, name.offset)
            break
    bases = [name.offset for name in names if name.suffix == LOG]
    for base, following in pairwise([*bases, offset]):
        path = path_of(folder, base, LOG)
        if following <= states.end_offset:
            continue
        with closing(FileReader(OpenFile(path))) as log:
            for header in headers_of(path):
                if states.end_offset <= header.base_offset < following:
                    data = batch_of(log, header) if header.is_control else b""
                    apply_batch(states, header, data)
                if header.next_offset >= following:
                    break  # a crash may have left anything at the end
    return format_snapshot(map(_to_entry, states))


def _put_entries(states: ProducerStates, entries: Iterable[ProducerEntry], offset: int) -> None:
    for entry in entries:
        states.put_producer(_from_entry(entry))
    states.end_offset = offset


def restore_older_batches(states: ProducerStates, headers: Iterable[BatchHeader]) -> None:
    """Add the batches before each producer's last one to its entry, from the log's headers."""
    older: dict[int, list[ProducerBatch]] = {}
    for header in headers:
        known = states.get(header.producer_id) if header.producer_id >= 0 else None
        if known is None or header.is_control or header.producer_epoch != known.epoch:
            continue
        batch = ProducerBatch(
            header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
        )
        if not known.batches or batch.last_offset < known.batches[0].last_offset:
            older.setdefault(header.producer_id, []).append(batch)
    for producer_id, batches in older.items():
        known = states.get(producer_id)
        assert known is not None
        merged = (*batches, *known.batches)[-REMEMBERED_BATCHES:]
        states.put_producer(known._replace(batches=merged))


def _to_entry(producer: Producer) -> ProducerEntry:
    last = producer.batches[-1] if producer.batches else ProducerBatch(-1, -1, 0, -1)
    return ProducerEntry(
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        last_sequence=last.last_sequence,
        last_offset=last.last_offset,
        offset_delta=last.offset_delta,
        timestamp=producer.last_timestamp,
        coordinator_epoch=producer.coordinator_epoch,
        current_txn_first_offset=producer.transaction_first_offset,
    )


def _from_entry(entry: ProducerEntry) -> Producer:
    batch = ProducerBatch(
        entry.last_sequence, entry.last_offset, entry.offset_delta, entry.timestamp
    )
    return Producer(
        producer_id=entry.producer_id,
        epoch=entry.producer_epoch,
        batches=(batch,) if entry.last_offset >= 0 else (),
        coordinator_epoch=entry.coordinator_epoch,
        transaction_first_offset=entry.current_txn_first_offset,
        last_timestamp=entry.timestamp,
    )


def rebuild_indexes(state: LogState, segment: Segment) -> None:
    """Replace `.index` and `.timeindex` of a sealed segment. Raises CorruptBatch, OSError
    (FileNotFoundError: it was deleted or replaced, or the log was closed).
    """
    with _built(state, segment) as builder:
        builder.add_time_entry()
        write_indexes(state, segment, builder)


def rebuild_for_reading(state: LogState, segment: Segment) -> None:
    """As `rebuild_indexes`, also for the active segment; if the disk takes no files, the indexes
    are only in memory: retention and reads must work on a full disk too. Raises only what reading
    the segment raises.
    """
    with _built(state, segment) as builder:
        if segment is state.active.segment:
            state.active.replace_entries(builder)
            return
        builder.add_time_entry()
        try:
            write_indexes(state, segment, builder)
        except OSError:
            offsets, times = builder.images()
            cache = state.files.indexes
            cache.put_columns(segment.name(OFFSET_INDEX), IndexColumns(OFFSET_ENTRY, offsets))
            cache.put_columns(segment.name(TIME_INDEX), IndexColumns(TIME_ENTRY, times))


@contextmanager
def _built(state: LogState, segment: Segment) -> Iterator[IndexBuilder]:
    """A builder with all batches, and the log's lock. Raises FileNotFoundError if the segment was
    deleted or replaced, or the log was closed.
    """
    builder = IndexBuilder(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
    position = _add_batches(state, segment, builder, start=0)
    with state.lock:
        if state.closed or segment not in state.segments.items:
            raise FileNotFoundError(segment.name(LOG))
        _add_batches(state, segment, builder, start=position)  # appended meanwhile
        yield builder


def _add_batches(state: LogState, segment: Segment, builder: IndexBuilder, *, start: int) -> int:
    """Add the batches from the position `start` on; returns where they end."""
    for header in segment.headers(state.files, start=start):
        builder.index_batch(header, position=header.position)
        start = header.end_position
    return start


def rebuild_transactions(
    state: LogState | OpeningLog, segment: Segment, snapshots: set[int]
) -> None:
    """Replace `.txnindex`. The transactions that its markers abort may have begun in earlier
    segments.

    `snapshots`: the offsets of those in the folder. Raises CorruptBatch.
    """
    start = state.segments.bases[0]
    producers = load_newest(state, snapshots, at_most=segment.base_offset, at_least=start)
    replay(state, producers, end_offset=segment.base_offset)
    aborted = replay(state, producers, end_offset=segment.end.next_offset)
    write_entries(segment, aborted, disk=state.disk)


def write_indexes(state: LogState | OpeningLog, segment: Segment, builder: IndexBuilder) -> None:
    """Write and sync the index files of a sealed segment."""
    for suffix, data in zip((OFFSET_INDEX, TIME_INDEX), builder.images(), strict=True):
        path = segment.path(suffix)
        write_atomically(path, data, disk=state.disk, sync=True)
        state.files.invalidate(path)
    segment.largest = builder.largest
    state.disk.sync_folder(state.folder)
