"""Segments as the bucket alone shows them."""

from __future__ import annotations

from tests.fakes.manifests import entry
from tierlog.cli.bucket_reader import BucketReader
from tierlog.object_store.memory import MemoryStore


def test_a_segment_without_timestamps_has_no_largest_one() -> None:
    shown = BucketReader(MemoryStore()).segment(entry(0, min_timestamp=-1, max_timestamp=-1))
    assert shown.max_timestamp is None
