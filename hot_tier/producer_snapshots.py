"""Producer snapshots: `<offset>.snapshot` holds the producers as they were before that offset.

* One is written at every roll and at a clean shutdown; recovery starts from the newest valid one.
* A snapshot keeps one batch per producer, as in Kafka. The older ones are restored from the log's
  last `READ_BACK_BYTES`, so that duplicates are recognised after a restart too.
* A snapshot with a bad checksum or an unknown version (a crash can leave zeros) is removed and an
  older one used, which only costs a longer replay. At the log start there is no older one: the
  other tier is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

from tierlog.host.clock import monotonic_ms
from tierlog.host.durable_file import read_whole, write_atomically
from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.batch_walk import batch_of, headers_of
from tierlog.hot_tier.file_names import LOG, SNAPSHOT, path_of, segment_files
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import (
    REMEMBERED_BATCHES,
    Producer,
    ProducerBatch,
    ProducerStates,
)
from tierlog.hot_tier.replay import apply_batch, replay
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.errors import CorruptSnapshot, UnknownFormatVersion
from tierlog.record_format.producer_snapshot import ProducerEntry, format_snapshot, parse_snapshot

READ_BACK_BYTES: Final = 8 << 20


def write_snapshot(state: LogState, offset: int, *, sync: bool = False) -> None:
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


def _write(state: LogState, offset: int, producers: Iterable[Producer], *, sync: bool) -> Path:
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
    state: LogState, offsets: set[int], *, at_most: int, at_least: int
) -> ProducerStates:
    """The states of the newest valid snapshot in [at_least, at_most]; if there is none, those that
    the other tier has at `at_least`, the log start.

    `offsets` are those of the snapshots in the folder. Bad ones are removed from the folder and
    from `offsets`; the one from the other tier is added.
    """
    states = ProducerStates(state.monotonic_clock)
    for offset in sorted(offsets, reverse=True):
        if not at_least <= offset <= at_most:
            continue
        path = path_of(state.folder, offset, SNAPSHOT)
        entries = _read(path)
        if entries is None:
            state.disk.unlink(path)
            offsets.discard(offset)
            continue
        _put_entries(states, entries, offset)
        return states
    states.end_offset = at_least
    if found := state.fetch_producer_snapshot(at_least):
        path = path_of(state.folder, at_least, SNAPSHOT)
        _put_entries(states, parse_snapshot(found, file=str(path)), at_least)
        write_atomically(path, found, disk=state.disk, sync=True)
        offsets.add(at_least)
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
        log = FileReader(OpenFile(path))
        for header in headers_of(path) if following > states.end_offset else ():
            if states.end_offset <= header.base_offset < following:
                data = batch_of(log, header) if header.is_control else b""
                apply_batch(states, header, data)
            if header.next_offset >= following:
                break  # a crash may have left anything at the end
    return format_snapshot(map(_to_entry, states))


def _put_entries(states: ProducerStates, entries: Iterable[ProducerEntry], offset: int) -> None:
    for entry in entries:
        states.put(_from_entry(entry))
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
        states.put(known._replace(batches=merged))


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
