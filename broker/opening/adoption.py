"""Adopts partition folders that Kafka left in a data folder as topics.

* Kafka's internal folders are ignored: its internal topics, and folders that are being deleted or
  moved (`-delete`, `-future`, `-stray`).
* Older trees set diverged records aside under a name that a topic's folder can have. They would be
  taken for a topic: they move to where take-overs put them now.
* A log starts at its first segment if Kafka's checkpoint has an older start, as it does where older
  segments were moved to Kafka's remote storage (KIP-405): nothing else can be served.
* A gap that Kafka's cleaner left above the recovery point would be taken for a lost tail. If
  nothing distinguishes the two, the partition is not opened until Kafka was shut down cleanly.
* A topic is its id: a folder that was copied within the data folder has that of another topic, and
  would take its place. The start is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import structlog

from tierlog.broker.data_folder.data_folder import (
    CLEANER_CHECKPOINT,
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
    TopicPartition,
    diverged_folder,
    new_id,
    topic_id_of,
    with_suffix,
)
from tierlog.broker.data_folder.topic_registry import TOPICS, TopicRecord, TopicRegistry
from tierlog.broker.opening.opened_log import EPOCHS
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.medium import make_folders
from tierlog.hot_tier.log_folder import first_base_offset
from tierlog.hot_tier.sealed_segments import first_gap
from tierlog.record_format.errors import ConfigurationError, CorruptDataError, CorruptManifest
from tierlog.record_format.topic_rules import MAX_PARTITIONS

log = structlog.get_logger(__name__)

_PARTITION_FOLDER: Final = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>\d{1,9})\Z")
_OLD_DIVERGED: Final = re.compile(
    r"(?P<topic>(?P<partition_folder>.*-\d{1,9})\.diverged)-(?P<epoch>\d+)\Z"
)
_KAFKAS_OWN: Final = frozenset({"__cluster_metadata", "__remote_log_metadata"})
_UNLIMITED: Final = {"retention.ms": -1, "retention.bytes": -1}

Found = Mapping[str, Mapping[int, Path]]
"""Folders by topic and partition."""


def adopt(folder: DataFolder, registry: TopicRegistry, *, clock: Callable[[], int]) -> None:
    """Create topics for the folders that belong to none. Raises ConfigurationError, and
    CorruptManifest if the registry was lost.
    """
    _refuse_lost_registry(folder)
    _move_diverged(folder, registry)
    found = _found(folder, {one.name for one in (*registry.live(), *registry.deleted())})
    unclean = _unclean(folder, found)
    records = [
        _record(topic, folders, unclean, created_ms=clock()) for topic, folders in found.items()
    ]
    _refuse_copies([*registry.live(), *registry.deleted(), *records])
    _start_at_first_segments(folder, found)
    if folder.was_clean:  # Kafka was started and stopped on the folder since
        replace = msgspec.structs.replace
        records += [replace(one, unclean=()) for one in registry.live() if one.unclean]
    if records:
        registry.put_topics(*records)
    for topic, folders in found.items():
        log.info("topic adopted", topic=topic, partitions=sorted(folders))


def _refuse_lost_registry(folder: DataFolder) -> None:
    """Otherwise every topic would be adopted with the default configuration, which would then
    replace its own in the bucket. Only topics that were served from the folder have epochs.
    """
    registry = TOPICS.path(folder.path)
    if not registry.exists() and EPOCHS.read_document(folder.path):
        raise CorruptManifest(
            "the file is missing, and with it the topics' configuration", file=str(registry)
        )


def _move_diverged(folder: DataFolder, registry: TopicRegistry) -> None:
    """Only topics that are created here can have such names: then they are listed. Before there is
    a list, all folders are Kafka's.
    """
    if not TOPICS.path(folder.path).exists():
        return
    topics = {one.name for one in (*registry.live(), *registry.deleted())}
    for path in sorted(folder.path.iterdir()):
        match = _OLD_DIVERGED.match(path.name)
        if match is None or match["topic"] in topics or not path.is_dir():
            continue
        beside = diverged_folder(folder.path) / match["partition_folder"]
        targets = (with_suffix(beside, f"-{number}") for number in count(int(match["epoch"])))
        target = next(one for one in targets if not one.exists())
        make_folders(target.parent)
        path.rename(target)
        for parent in (target.parent, folder.path):
            REAL_DISK.sync_folder(parent)
        log.info("diverged records moved", old_folder=str(path), folder=str(target))


def _found(folder: DataFolder, known: set[str]) -> Found:
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.path.iterdir()):
        match = _PARTITION_FOLDER.match(path.name)
        if match and path.is_dir() and match["topic"] not in known | _KAFKAS_OWN:
            number = int(match["partition"])
            if number >= MAX_PARTITIONS:
                raise ConfigurationError(
                    f"{path}: would be partition {number} of topic {match['topic']!r}; a topic has "
                    f"at most {MAX_PARTITIONS}: move folders that are not Kafka's elsewhere"
                )
            found.setdefault(match["topic"], {})[number] = path
    return found


def _unclean(folder: DataFolder, found: Found) -> frozenset[TopicPartition]:
    """The partitions that Kafka compacted, or whose gaps no checkpoint explains, if it was not shut
    down cleanly. Recovery of an adopted topic expects no gaps: its cleanup policy is `delete`.
    """
    if folder.was_clean:
        return frozenset()
    compacted = folder.read_checkpoint(CLEANER_CHECKPOINT)
    flushed = folder.read_checkpoint(RECOVERY_POINTS)
    return frozenset(
        place
        for topic, folders in found.items()
        for number, path in folders.items()
        for place in [(topic, number)]
        if place in compacted or (place not in flushed and first_gap(path) is not None)
    )


def _refuse_copies(records: Iterable[TopicRecord]) -> None:
    """Refuse two topics with one id. `records`: the known topics, then those to be adopted."""
    names: dict[str, str] = {}
    for record in records:
        other = names.setdefault(record.topic_id, record.name)
        if other != record.name:
            raise ConfigurationError(
                f"{record.name}: its folders have the id of topic {other!r}: move the copy out of "
                "the data folder"
            )


def _start_at_first_segments(folder: DataFolder, found: Found) -> None:
    """Kafka does the same (UnifiedLog), unless remote storage has the offsets in between."""
    starts = folder.read_checkpoint(LOG_STARTS)
    raised = {}
    for (topic, partition), start in starts.items():
        path = found.get(topic, {}).get(partition)
        first = first_base_offset(path) if path is not None else None
        if first is not None and start < first:
            raised[topic, partition] = first
            log.warning(
                "older offsets are not in Kafka's folder: the log starts at its first segment",
                partition=f"{topic}-{partition}",
                kafkas_log_start=start,
                log_start_offset=first,
            )
    if raised:
        folder.write_checkpoint(LOG_STARTS, {**starts, **raised})


def _record(
    topic: str,
    folders: Mapping[int, Path],
    unclean: frozenset[TopicPartition],
    *,
    created_ms: int,
) -> TopicRecord:
    count = max(folders) + 1
    return TopicRecord(
        name=topic,
        topic_id=_topic_id(folders.values()) or new_id(),
        partitions=count,
        config=dict(_UNLIMITED),
        created_ms=created_ms,
        absent=tuple(number for number in range(count) if number not in folders),
        unclean=tuple(number for number in sorted(folders) if (topic, number) in unclean),
    )


def _topic_id(folders: Iterable[Path]) -> str | None:
    """The id that most of these partition folders have, since that of one may be damaged."""
    found: Counter[str] = Counter()
    for folder in folders:
        with suppress(CorruptDataError):
            if (topic_id := topic_id_of([folder])) is not None:
                found[topic_id] += 1
    return found.most_common(1)[0][0] if found else None
