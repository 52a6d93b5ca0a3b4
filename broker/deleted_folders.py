"""What a deleted topic leaves on disk: moved out of the way at once, and deleted later."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from broker.data_folder import DataFolder, topic_id_of
from broker.topic_registry import TopicRecord
from hot_tier.durable_file import sync_folder
from record_format.errors import CorruptDataError


def set_aside(folder: DataFolder, record: TopicRecord, *, is_name_free: bool) -> list[Path]:
    """Rename a deleted topic's folders out of the way of a new one of its name.

    Not while a topic is being made: a folder that does not say yet whose it is is taken for the
    deleted one's, until that was set aside: a crash leaves such a folder of the next topic of the
    name. So is one whose word for it rotted, where no other topic has the name. The new name is
    Kafka's (`<topic>-<p>.<id>-delete`), which its brokers and ours leave alone.
    """
    aside = []
    for number in range(record.partitions):
        path = folder.partition_folder(record.name, number)
        gone = path.with_name(f"{path.name}.{record.topic_id}-delete"[-255:])
        if path.exists() and _is_of(record, path, gone, is_name_free=is_name_free):
            if gone.exists():  # a start that did not find the deletion made the folder anew
                shutil.rmtree(gone)
            path.rename(gone)
        if gone.exists():
            aside.append(gone)
    if aside:
        sync_folder(folder.path)
    return aside


def _is_of(record: TopicRecord, path: Path, gone: Path, *, is_name_free: bool) -> bool:
    try:
        topic_id = topic_id_of([path])
        return topic_id == record.topic_id or (topic_id is None and not gone.exists())
    except CorruptDataError:
        return is_name_free


def remove(aside: Iterable[Path]) -> None:
    """Delete what was set aside."""
    for path in aside:
        shutil.rmtree(path)
