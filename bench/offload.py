"""Claim: a segment is offloaded nearly as fast as boto3 alone uploads the file.

* Measured: `SegmentUploader.upload` of a segment of 128 MiB, everything included: every batch is
  checked, chunk table and index bundle are built, both objects are uploaded and verified; with
  batches of 1 KiB, 16 KiB and 1 MiB.
* Peer: boto3's `upload_file` of the same file, with as many parts of the same size in flight.
* Both upload to one versitygw on loopback, from this process; CPU is this process's.
* Each upload begins with no dirty pages to be written, and its objects are deleted afterwards, so
  that the next ones reuse their pages. Otherwise the medians of two runs are far apart, because of
  the machine's disk and its host's memory.

`python -m bench offload`; takes about two minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from boto3.s3.transfer import TransferConfig

from bench import s3
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format import native
from tierlog.record_format.batch import parse_header, stamp

ROUNDS: Final = 15
SEGMENT_BYTES: Final = 128 << 20
BATCHES: Final = {1 << 10: "1 KiB", 16 << 10: "16 KiB", 1 << 20: "1 MiB"}
PARTS: Final = 4


@dataclass(frozen=True)
class Files:
    base_offset: int
    last_offset: int
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path | None = None
    snapshot: Path | None = None


class Spent(NamedTuple):
    seconds: float
    cpu_s: float


def measure(folder: Path, *, rounds: int) -> Report:
    native.load()
    report = Report(
        name="offload", title="A segment of 128 MiB into the bucket", peer="boto3 upload_file"
    )
    with s3.versitygw(folder) as bucket:
        client: Any = s3.client(bucket)
        store = open_store(f"s3://{s3.BUCKET}/bench", S3Options(endpoint=bucket.endpoint))
        for batch_bytes, name in BATCHES.items():
            files = _write(folder / name.replace(" ", ""), batch_bytes)
            uploader = SegmentUploader(
                store, limits=UploadLimits(part_bytes=s3.PART_BYTES, parts=PARTS)
            )
            uploads = {
                "ours": lambda: uploader.upload_segment(files, folder="segments/", leader_epoch=1),  # noqa: B023  called in this iteration
                "boto3": lambda: _upload_file(client, files.log),  # noqa: B023
            }
            runs = {who: partial(_timed, client, upload) for who, upload in uploads.items()}
            _add_rows(report, name, interleave(runs, rounds=rounds))
    return report


def _write(folder: Path, batch_bytes: int) -> Files:
    batch = batch_of_size(batch_bytes)
    records, count = parse_header(batch).record_count, SEGMENT_BYTES // batch_bytes
    body = bytearray(batch * count)
    for number in range(count):
        stamp(body, number * batch_bytes, base_offset=number * records, leader_epoch=1)
    folder.mkdir()
    contents: dict[str, bytes | bytearray] = {
        "log": body,
        "index": b"\0" * 8,
        "timeindex": b"\0" * 12,
    }
    for suffix, content in contents.items():
        (folder / f"{0:020d}.{suffix}").write_bytes(content)
    log, index, timeindex = (folder / f"{0:020d}.{suffix}" for suffix in contents)
    return Files(0, count * records - 1, log, index, timeindex)


def _upload_file(client: Any, path: Path) -> None:
    config = TransferConfig(
        multipart_threshold=s3.PART_BYTES,
        multipart_chunksize=s3.PART_BYTES,
        max_concurrency=PARTS,
    )
    client.upload_file(str(path), s3.BUCKET, f"bench/peer/{time.monotonic_ns()}", Config=config)


def _timed(client: Any, upload: Callable[[], object]) -> Spent:
    os.sync()
    began, cpu_began = time.perf_counter(), time.process_time()
    upload()
    spent = Spent(time.perf_counter() - began, time.process_time() - cpu_began)
    for one in client.list_objects_v2(Bucket=s3.BUCKET)["Contents"]:
        client.delete_object(Bucket=s3.BUCKET, Key=one["Key"])
    return spent


def _add_rows(report: Report, name: str, seen: dict[str, list[Spent]]) -> None:
    def speeds(runs: Sequence[Spent]) -> list[float]:
        return [SEGMENT_BYTES / 1e6 / one.seconds for one in runs]

    def cpu(runs: Sequence[Spent]) -> list[float]:
        return [one.cpu_s / (SEGMENT_BYTES / 1e9) for one in runs]

    ours, peer = seen["ours"], seen["boto3"]
    report.add(f"batches of {name}", "MB/s", speeds(ours), speeds(peer), target=Target(value=0.85))
    report.add(f"batches of {name}, CPU", "CPU s/GB", cpu(ours), cpu(peer))
