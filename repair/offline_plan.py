"""Plans a repair of a stopped broker's data folder. Changes nothing on disk or in the bucket.

* The overlay is a folder elsewhere with copies of the small files and links to those of one
  topic's logs (`hot_tier.closed_log`). The data folder itself stays locked meanwhile.
* A broker without background work opens the overlay, and decides as it would on the folder.
* The store is only read. An attempt to write to it ends the plan with an error that says so.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn, cast

import msgspec

from tierlog.broker.broker import Broker
from tierlog.broker.data_folder import DataFolder, folder_lock
from tierlog.broker.ownership.take_over import TAKE_OVERS
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.store_status import PROBE, ProbeResult
from tierlog.broker.topic_registry import TopicRegistry
from tierlog.host.clock import wall_clock_ms
from tierlog.hot_tier.closed_log import OverlayDisk, link_files
from tierlog.object_store.probe import StoreTraits
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import ConfigurationError, ObjectExists
from tierlog.repair.repair import repair_topic
from tierlog.repair.repair_step import RepairStep

LEFT_OUT: Final = ("cache", "uploads", "scratch", "damaged")  # below `tierlog/`: large, not needed


def plan_repair(
    settings: BrokerSettings, store: ObjectStore | None, topic: str, *, deep: bool
) -> list[RepairStep]:
    """What `repair_topic` with `apply` would do. `store` is closed when this returns.

    Raises ConfigurationError, UnknownTopic, FencedError, StoreUnavailable, CorruptDataError.
    """
    data_dir = settings.data_dir
    with closing(store) if store else nullcontext(), overlay(data_dir, topic) as place:
        if store is not None:
            _believe_probe(place, store, single_writer=settings.allow_single_writer_store)
        broker = Broker.open_idle(
            replace(settings, data_dir=place, take_over=False),
            store=cast(ObjectStore, ReadOnlyStore(store)) if store is not None else None,
            disk=OverlayDisk(),
        )
        try:
            steps = repair_topic(broker, topic, deep=deep)
        finally:
            broker.close()
    return [
        msgspec.structs.replace(step, detail=step.detail.replace(str(place), str(data_dir)))
        for step in steps
    ]


class ReadOnlyStore:
    """A store of which only the calls that read are left."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put(self, key: str, _body: object, *, if_absent: bool = False, **_: object) -> NoReturn:
        if if_absent and self._store.head(key) is not None:
            raise ObjectExists(key)
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigurationError(
            f"planning must not write to {self._store.url}, but the first start with this store "
            "does: start the broker once"
        )

    put_file = delete = abort_upload = _refuse


@contextmanager
def overlay(data_dir: Path, topic: str) -> Iterator[Path]:
    """A temporary folder to open in place of `data_dir`, with only that topic. Raises
    ConfigurationError if a broker has the folder open, or a take-over has begun.
    """
    with folder_lock(data_dir), tempfile.TemporaryDirectory(prefix="tierlog-plan-") as made:
        if TAKE_OVERS.path(data_dir).exists():
            raise ConfigurationError(
                f"{data_dir}: its partitions are being taken over, after a restore or with "
                "--take-over: start the broker once to complete that, or use --apply"
            )
        place = Path(made)
        for path in data_dir.iterdir():
            if path.is_file() and path.name != ".lock":
                shutil.copyfile(path, place / path.name)
            elif path.is_dir() and re.fullmatch(re.escape(topic) + r"-\d{1,9}", path.name):
                link_files(path, place / path.name)
        leave_out = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(data_dir / "tierlog", place / "tierlog", ignore=leave_out)
        _keep_one(TopicRegistry(place), topic)
        yield place


def _keep_one(registry: TopicRegistry, topic: str) -> None:
    for record in (*registry.live(), *registry.deleted()):
        if record.name != topic:
            registry.forget(record.topic_id)


def _believe_probe(place: Path, store: ObjectStore, *, single_writer: bool) -> None:
    """If a store was ever used, do not probe this one: a probe writes, and a plan needs none."""
    folder = DataFolder(place)
    if PROBE.read(place) is not None:
        believed = ProbeResult(
            store=(store.url, single_writer),
            place=store.identity,
            traits=StoreTraits(checks_checksums=False),  # so that none are tried
            probed_ms=wall_clock_ms(),
        )
        PROBE.write(place, believed)
    folder.put_back_clean_marker()
    folder.close()
