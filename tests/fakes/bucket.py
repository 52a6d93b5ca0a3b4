"""A bucket filled as by a broker, from partition folders written by a real Kafka.

The uploader, the manifest and the topic objects are real; there is no broker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tests.fakes.cold_segments import FIXTURES, SegmentFiles
from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import EpochStart, Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.manifest.transitions import Claim, add_segments
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import iter_headers

NOW_MS = 1_800_000_000_000


def segment_files(folder: Path) -> list[SegmentFiles]:
    """The non-empty segments of a folder, oldest first, with the active one.

    A segment ends where the next begins, even if compaction removed its last records.
    """
    logs = [log for log in sorted(folder.glob("*.log")) if log.stat().st_size]
    ends = [int(log.stem) for log in logs[1:]]
    if logs:
        *_, last = iter_headers(logs[-1].read_bytes())
        ends.append(last.next_offset)
    return [_files(log, next_offset) for log, next_offset in zip(logs, ends, strict=True)]


def _files(log: Path, next_offset: int) -> SegmentFiles:
    txnindex = log.with_suffix(".txnindex")
    snapshot = log.with_name(f"{next_offset:020d}.snapshot")
    return SegmentFiles(
        int(log.stem),
        next_offset - 1,
        log,
        log.with_suffix(".index"),
        log.with_suffix(".timeindex"),
        txnindex if txnindex.exists() else None,
        snapshot if snapshot.exists() else None,
    )


def manifests_of(store: ObjectStore, topic: str, partition: int) -> ManifestStore:
    keys = PartitionKeys(topic, topic_id_of(topic), partition)
    return ManifestStore(store, keys, StoreOptions(clock=lambda: NOW_MS))


def topic_id_of(topic: str) -> str:
    return f"id-of-{topic}"


def put_partition(
    store: ObjectStore,
    topic: str,
    partition: int,
    files: Sequence[SegmentFiles],
    *,
    chunk_bytes: int = 4096,
    log_start_offset: int | None = None,
) -> Manifest:
    """Upload and commit one segment after another: a manifest version for each."""
    manifests = manifests_of(store, topic, partition)
    if log_start_offset is None:
        log_start_offset = files[0].base_offset if files else 0
    epochs = (EpochStart(0, log_start_offset, "owner"),)
    claim = Claim("owner", epochs, frozenset([("owner", 0)]))  # also from an earlier call
    manifest = manifests.claim_manifest(claim, log_start_offset=log_start_offset)
    uploader = SegmentUploader(store, limits=UploadLimits(chunk_bytes=chunk_bytes))
    for segment in files:
        uploaded = uploader.upload_segment(segment, folder=manifests.keys.segments, leader_epoch=0)
        entry = replace(uploaded, modified_ms=NOW_MS)
        manifest = manifests.commit_manifest(
            manifest, lambda base, entry=entry: add_segments(base, [entry])
        )
    return manifest


def put_topic(store: ObjectStore, topic: str, partitions: Mapping[int, str]) -> None:
    """A topic whose partitions are fixtures, by name; each is uploaded whole."""
    topic_object = TopicObject(
        name=topic,
        topic_id=topic_id_of(topic),
        partitions=max(partitions) + 1,
        config={},
        created_ms=NOW_MS,
    )
    TopicObjects(store).write_topic(topic_object, check=lambda: None)
    for number, fixture in partitions.items():
        put_partition(store, topic, number, segment_files(FIXTURES / fixture))
