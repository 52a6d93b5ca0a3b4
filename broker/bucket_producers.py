"""Reads producer state from a partition's bucket: each segment's `.indexes` object holds Kafka's
producer snapshot at the end of that segment.

If a snapshot is lost with its object, a retried request may be appended twice; that does not keep a
partition from being restored.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

import structlog

from cold_tier.segment_indexes import load_bundle
from manifest.state import Manifest
from manifest.store import ManifestStore
from record_format.errors import CorruptDataError

log = structlog.get_logger(__name__)


def producers_at_end(manifests: ManifestStore, manifest: Manifest | None) -> bytes | None:
    return producers_below(manifests, manifest, manifest.end_offset) if manifest else None


def producers_below(manifests: ManifestStore, manifest: Manifest, offset: int) -> bytes | None:
    """The snapshot at the end of the last segment that begins below `offset`; None if there is
    none, or it is lost. Raises StoreUnavailable.
    """
    runs = (*manifest.pages, *manifest.segments)
    start = max((run.base_offset for run in runs if run.base_offset < offset), default=None)
    if start is None:
        return None
    following = manifests.iter_entries(manifest, from_offset=start)
    try:
        newest = deque(takewhile(lambda one: one.base_offset < offset, following), maxlen=1)[-1]
        return load_bundle(manifests.objects, newest).producer_snapshot or None
    except CorruptDataError as bad:
        log.error("producer state not restored", partition=str(manifests.keys), error=str(bad))
        return None
