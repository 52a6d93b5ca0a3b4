"""What commands share that work on a bucket without a broker.

The options are those of `serve`: the same names, the same variables, AWS's own chain for
credentials.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from broker.broker import Broker
    from cold_tier.object_store import ObjectStore
    from manifest.garbage import GarbagePolicy

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="TIERLOG_STORE",
        help="s3://bucket/prefix or file:///folder.",
        metavar="URL",
    ),
]
OfflineStoreOption = Annotated[
    str | None,  # of no variable: that a store is known is no wish to go past the broker
    typer.Option("--store", metavar="URL", help="Offline: the bucket by itself, no broker."),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--s3-endpoint",
        envvar="TIERLOG_S3_ENDPOINT",
        help="URL of an S3 server that is not AWS.",
        metavar="URL",
    ),
]
RegionOption = Annotated[
    str | None,
    typer.Option(
        "--s3-region",
        envvar="TIERLOG_S3_REGION",
        help="Region, where AWS's own configuration does not say it.",
        metavar="REGION",
    ),
]
DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="TIERLOG_DATA_DIR",
        help="The owner's data folder; no broker may have it open.",
        metavar="DIR",
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option("--take-over", help="Take over partitions that another folder owns, first."),
]
SingleWriterOption = Annotated[
    bool, typer.Option("--allow-single-writer-store", help="As for serve.")
]

GraceOption = Annotated[
    int,
    typer.Option(
        "--gc-grace-ms",
        envvar="TIERLOG_GC_GRACE_MS",
        min=0,
        help="As for serve: what is younger stays.",
        metavar="MS",
    ),
]
VersionsOption = Annotated[
    int,
    typer.Option(
        "--manifest-versions-min",
        envvar="TIERLOG_MANIFEST_VERSIONS_MIN",
        min=1,
        help="As for serve.",
        metavar="N",
    ),
]
GapOption = Annotated[
    int,
    typer.Option(
        "--restore-offset-gap",
        envvar="TIERLOG_RESTORE_OFFSET_GAP",
        min=1,
        help="As for serve: offsets left out by a take-over, so that none is given twice.",
        metavar="COUNT",
    ),
]

GRACE_MS = 86_400_000
VERSIONS_MIN = 100
OFFSET_GAP = 1_000_000_000
NEVER_MS = 10**12


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def opened_store(
    url: str, endpoint: str | None = None, region: str | None = None
) -> Iterator[ObjectStore]:
    from cold_tier.open import open_store

    store = open_store(url, endpoint=endpoint, region=region, must_exist=True)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_owner(
    data_dir: Path,
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    take_over: bool = False,
    gap: int = OFFSET_GAP,
    allow_single_writer_store: bool = False,
    policy: GarbagePolicy,
) -> Iterator[Broker]:
    """A broker that nobody reaches, on the owner's folder: it holds the folder's lock.

    Nothing is rolled, uploaded or let go meanwhile; what is collected goes by `policy`. Raises
    ConfigurationError.
    """
    from broker.broker import Broker
    from broker.settings import BrokerSettings
    from cold_tier.open import open_store
    from record_format import native
    from record_format.errors import ConfigurationError
    from tierlog.cli.logs import configure_logs

    if not (data_dir / "meta.properties").exists():
        raise ConfigurationError(f"{data_dir} is no broker's data folder")
    configure_logs(verbose=bool(os.environ.get("TIERLOG_VERBOSE")))
    settings = BrokerSettings(
        data_dir=data_dir,
        take_over=take_over,
        restore_offset_gap=gap,
        allow_single_writer_store=allow_single_writer_store,
        retention_check_interval_ms=NEVER_MS,
        gc_grace_ms=policy.grace_ms,
        manifest_versions_min=policy.keep_min,
    )
    native.load()
    store = open_store(url, endpoint=endpoint, region=region, must_exist=True)
    broker = Broker.open(settings, store=store)
    try:
        yield broker
    finally:
        broker.close()
