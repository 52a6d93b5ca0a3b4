"""A deleted topic's folders on disk: renamed at once, removed later."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tierlog.broker.data_folder import DataFolder, topic_id_of, with_suffix
from tierlog.broker.topic_registry import TopicRecord
from tierlog.host.durable_file import REAL_DISK
from tierlog.record_format.errors import CorruptDataError


def set_aside(folder: DataFolder, record: TopicRecord, *, is_name_free: bool) -> list[Path]:
    """Rename a deleted topic's folders, so that a new topic can use the name. Their new paths.

    The new name is Kafka's (`<topic>-<p>.<id>-delete`), which Kafka's brokers and ours ignore. Do
    not call it while a topic of that name is being created: a folder without topic id yet is taken
    for the deleted topic's, unless that was already renamed, because a crash may leave such a
    folder. So is one whose topic id is corrupt, if no live topic has the name.
    """
    aside = []
    for number in range(record.partitions):
        path = folder.partition_folder(record.name, number)
        gone = with_suffix(path, f".{record.topic_id}-delete")
        if path.exists() and _is_of(record, path, gone, is_name_free=is_name_free):
            if gone.exists():  # a start that missed the deletion re-created the folder
                shutil.rmtree(gone)
            path.rename(gone)
        if gone.exists():
            aside.append(gone)
    if aside:
        REAL_DISK.sync_folder(folder.path)
    return aside


def _is_of(record: TopicRecord, path: Path, gone: Path, *, is_name_free: bool) -> bool:
    try:
        topic_id = topic_id_of([path])
        return topic_id == record.topic_id or (topic_id is None and not gone.exists())
    except CorruptDataError:
        return is_name_free


def remove(aside: Iterable[Path]) -> None:
    """Delete folders that were set aside."""
    for path in aside:
        shutil.rmtree(path)
