"""Generated segments, on disk and uploaded, for tests of the cold tier."""

import random
from dataclasses import dataclass
from pathlib import Path

from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.segment_entry import SegmentEntry

FOLDER = "topics/t/id/0/segments/"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "kafka"


@dataclass(frozen=True)
class SegmentFiles:
    """What the uploader needs of a sealed segment."""

    base_offset: int
    last_offset: int
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path | None = None
    snapshot: Path | None = None


@dataclass(frozen=True)
class Written:
    """A generated segment: its files, its bytes, and (offset, timestamp) of every record."""

    files: SegmentFiles
    body: bytes
    records: list[tuple[int, int]]
    batch_ends: list[int]


def write_segment(
    folder: Path, *, base_offset=0, batches=40, records=7, value_bytes=300, seed=1, codec=0
) -> Written:
    """Write random batches with unordered timestamps."""
    dice = random.Random(seed)
    body, offset, facts, ends = bytearray(), base_offset, [], []
    for _ in range(batches):
        count = dice.randint(1, records)
        stamps = [dice.randint(1_000, 1_000_000) for _ in range(count)]
        values = [dice.randbytes(dice.randint(1, value_bytes)) for _ in range(count)]
        body += encode_batch(
            values, timestamps=stamps, base_offset=offset, leader_epoch=3, codec=codec
        )
        facts += [(offset + delta, stamp) for delta, stamp in enumerate(stamps)]
        offset += count
        ends.append(len(body))
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{base_offset:020d}"
    stem.with_suffix(".log").write_bytes(body)
    stem.with_suffix(".index").write_bytes(b"\0\0\0\1\0\0\0\2")
    stem.with_suffix(".timeindex").write_bytes(b"t" * 12)
    files = SegmentFiles(
        base_offset,
        offset - 1,
        stem.with_suffix(".log"),
        stem.with_suffix(".index"),
        stem.with_suffix(".timeindex"),
    )
    return Written(files, bytes(body), facts, ends)


def upload(
    store, written: Written, *, chunk_bytes=4096, filters_keys=True, **options
) -> SegmentEntry:
    uploader = SegmentUploader(store, limits=UploadLimits(chunk_bytes=chunk_bytes), **options)
    return uploader.upload_segment(
        written.files, folder=FOLDER, leader_epoch=3, filters_keys=filters_keys
    )
