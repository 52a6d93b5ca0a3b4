"""Raises the format level of a data folder and its bucket to the newest that this version has.

| a crash or failure             | leaves                                                          |
|--------------------------------|-----------------------------------------------------------------|
| before the bucket's is raised  | everything as it was                                            |
| between the two                | older versions refuse the bucket; the same command completes it |
| after the folder's is raised   | it is done                                                      |

* First everything is opened as the next start would open it, on an overlay: a folder with a damaged
  or lost partition is not finalized, since going back to the last version may be what saves it.
* The bucket's level is raised first, and the folder's last, by one rename: the broker writes by the
  folder's level, so nothing of the new level is written before both are recorded.
* The folder stays locked from the first check until the last write.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import msgspec

from tierlog.broker.broker import Broker
from tierlog.broker.data_folder.data_folder import read_level, write_level
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.bucket_level import BucketLevel
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import ConfigurationError
from tierlog.record_format.format_level import LEVELS, newest_level
from tierlog.repair.repair import planning


class FinalizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`partitions`: how many were checked. `read_since`: the oldest version that reads `to_level`.
    `finalized`: whether the folder has that level now.
    """

    data_dir: Path
    store: str | None
    from_level: int
    to_level: int
    read_since: str
    partitions: int = 0
    finalized: bool


def finalize(
    settings: BrokerSettings, store: ObjectStore | None, *, dry_run: bool
) -> FinalizeReport:
    """Idempotent. `dry_run` checks, and changes nothing. `store` is closed when this returns.

    Raises ConfigurationError (also if a partition could not be served), FencedError,
    StoreUnavailable, CorruptDataError.
    """
    level, newest = read_level(settings.data_dir), newest_level()
    report = FinalizeReport(
        data_dir=settings.data_dir,
        store=store.url if store is not None else None,
        from_level=level,
        to_level=newest,
        read_since=LEVELS[newest],
        finalized=level == newest,
    )
    with closing(store) if store else nullcontext():
        if report.finalized:
            return report
        with planning(settings, store) as broker:
            checked = _check_all(broker)
            if not dry_run:
                if store is not None:
                    BucketLevel(store).raise_level(newest)
                write_level(settings.data_dir, newest)
    return msgspec.structs.replace(report, partitions=checked, finalized=not dry_run)


def _check_all(broker: Broker) -> int:
    """How many partitions there are, all of which a start would serve."""
    if broker.bucket is not None:
        broker.bucket.store_status.require_store()
    if damaged := [f"{one}: {one.reason}" for one in broker.damaged_partitions()]:
        raise ConfigurationError(
            f"not finalized, since these are damaged, and the last version must stay able to open "
            f"them: {'; '.join(damaged)}"
        )
    partitions = list(broker.partitions())
    for partition in partitions:
        if partition.has_bucket:
            partition.check_claim()
    return len(partitions)
