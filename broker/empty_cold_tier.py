"""The cold tier of a partition without a bucket: empty, so that nobody has to ask for one.

* It has no record, and never counts as having one: `end_offset` is 0, whatever the log holds. Local
  segments are then deleted by the topic's retention alone.
* Nobody else can own the partition, so there is nothing to claim, and nothing to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
from tierlog.manifest.state import Manifest
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.errors import UnknownManifestVersion
from tierlog.record_format.segment_entry import SegmentEntry

BOUNDARIES: Final[frozenset[int]] = frozenset()


class EmptyColdTier:
    """As much of `ColdLog` as `Partition` uses."""

    exists: Final = False
    is_claimed: Final = True
    is_store_reachable: Final = False
    is_busy: Final = False
    is_owner_look_due: Final = False
    owner_looked_ms: Final = 0
    leadership_lost: str | None = None
    manifest: Manifest | None = None
    end_offset: int = 0
    size_bytes: Final = 0
    segment_boundaries: Final = BOUNDARIES

    def __init__(self, name: str) -> None:
        self._name = name

    def entries(self, _from_offset: int) -> Iterator[SegmentEntry]:
        return iter(())

    def oldest_first(self, _from_offset: int) -> Iterator[SegmentEntry]:
        return iter(())

    def version(self, _version: int | None) -> Manifest:
        raise UnknownManifestVersion(
            f"{self._name} is on local disk alone: the broker has no object store, or its topic "
            "says remote.storage.enable=false"
        )

    def entries_of(self, _manifest: Manifest, **_: int) -> Iterator[SegmentEntry]:
        return iter(())

    def history(self, **_: int) -> list[VersionStat]:
        return []

    def full_key(self, key: str) -> str:
        return key

    def resolve_failed_commit(self) -> None:
        pass

    def garbage_plan(self, _policy: GarbagePolicy) -> GarbagePlan | None:
        return None

    def claim(self, **_: int) -> bool:
        return False

    def check_claim(self, **_: int) -> None:
        pass

    def look_for_owner(self, **_: int) -> None:
        pass

    def retire(self) -> None:
        pass

    def record_trim(self, before_offset: int) -> None:
        pass

    def follow_log_start(self, log_start_offset: int) -> None:
        pass

    def check_clock(self) -> None:
        pass

    def recheck_store(self) -> bool:
        return False

    def merge_pages(self) -> None:
        pass

    def collect_garbage(self, _policy: GarbagePolicy) -> int:
        return 0

    def check_change(self, *_: LogConfig, **__: int) -> None:
        pass
