"""The options of commands whose changes are reserved to a bucket's owner, and how to open it.

They are those of `serve`: the same names, variables and meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.broker.settings import BrokerSettings
from tierlog.cli.bucket_options import BucketOptions, EndpointOption, RegionOption
from tierlog.cli.option_groups import setting_option

if TYPE_CHECKING:
    from tierlog.broker.broker import Broker
    from tierlog.broker.repair.repair_step import RepairStep
    from tierlog.manifest.garbage import GarbagePolicy
    from tierlog.object_store.store import ObjectStore

DataDirOption = Annotated[
    Path,
    setting_option(
        "data.dir", metavar="DIR", help="The owner's data folder; no broker may have it open."
    ),
]
OwnStoreOption = Annotated[
    str | None,
    setting_option(
        "store",
        metavar="URL",
        help="s3://bucket/prefix or file:///folder; omit it for a folder without a bucket.",
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option("--take-over", help="First take over partitions that another folder owns."),
]
SingleWriterOption = Annotated[
    bool, typer.Option("--allow-single-writer-store", help="As for serve.")
]

GraceOption = Annotated[
    int,
    setting_option("gc.grace.ms", metavar="MS", help="As for serve: what is younger is kept."),
]
VersionsOption = Annotated[
    int,
    setting_option("manifest.versions.min", metavar="N", help="As for serve.", show_envvar=False),
]
GapOption = Annotated[
    int,
    setting_option(
        "restore.offset.gap",
        help="As for serve: offsets skipped by a take-over, so that none is assigned twice.",
        metavar="N",
    ),
]

_DEFAULTS: Final[dict[str, Any]] = {one.name: one.default for one in fields(BrokerSettings)}
OFFSET_GAP: Final[int] = _DEFAULTS["restore_offset_gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOptions:
    """How to open the owner. Its folder is an option of the command itself."""

    store: OwnStoreOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None
    take_over: TakeOverOption = False
    gap: GapOption = OFFSET_GAP
    single_writer: SingleWriterOption = False
    grace_ms: GraceOption = _DEFAULTS["gc_grace_ms"]
    versions_min: VersionsOption = _DEFAULTS["manifest_versions_min"]

    @property
    def bucket(self) -> BucketOptions | None:
        return BucketOptions.if_given(self.store, self.endpoint, self.region)

    def policy(self) -> GarbagePolicy:
        from tierlog.manifest.garbage import GarbagePolicy

        return GarbagePolicy(grace_ms=self.grace_ms, keep_min=self.versions_min)

    @contextmanager
    def broker(self, data_dir: Path) -> Iterator[Broker]:
        """Open a broker on the owner's folder, with its lock, without a server and background work.

        Raises ConfigurationError.
        """
        from tierlog.broker.broker import Broker

        settings, store = self._open_store(data_dir)
        broker = Broker.open_idle(settings, store=store)
        try:
            yield broker
        finally:
            broker.close()

    def repair_plan(self, data_dir: Path, topic: str, *, deep: bool) -> list[RepairStep]:
        """The steps of a repair; changes nothing. Raises ConfigurationError."""
        from tierlog.broker.repair.offline_plan import plan_repair

        settings, store = self._open_store(data_dir)
        return plan_repair(settings, store, topic, deep=deep)

    def _open_store(self, data_dir: Path) -> tuple[BrokerSettings, ObjectStore | None]:
        from tierlog.broker.store_status import check_has_no_bucket
        from tierlog.cli.logs import configure_logs
        from tierlog.record_format import native
        from tierlog.record_format.errors import ConfigurationError

        if not (data_dir / "meta.properties").exists():
            raise ConfigurationError(f"{data_dir} is not a broker's data folder")
        configure_logs()
        settings = BrokerSettings(
            data_dir=data_dir,
            take_over=self.take_over,
            restore_offset_gap=self.gap,
            allow_single_writer_store=self.single_writer,
            gc_grace_ms=self.grace_ms,
            manifest_versions_min=self.versions_min,
        )
        with suppress(ImportError):  # no numba, or another: slower, with the same results
            native.load()
        bucket = self.bucket
        if bucket is None:
            check_has_no_bucket(data_dir)
        return settings, bucket.open() if bucket else None
