"""Deletes a topic's objects from the bucket. A broker that stalls at any step does no harm.

| step                                       | if another folder takes the topic over meanwhile    |
|--------------------------------------------|-----------------------------------------------------|
| write a topic object with `deleted`        | the new owner writes a newer version of its own     |
|                                            | once it has claimed the partitions                  |
| commit a manifest that names nothing, for  | it claimed first: the commit is refused, the rest   |
| each partition, under the epoch in force   | stays; or it claims later, and finds an empty log   |
| LIST and delete the objects, page by page, | it names nothing that was there before its claim,   |
| checking the owner before each page        | and what it uploads has new names                   |
| delete the topic object's versions, with   | its own version is none of those that were listed   |
| the same check                             |                                                     |

* A DELETE cannot be conditional, so nothing is deleted that a later manifest could name.
* Every step may be repeated, also after a crash.
* Whatever is not guarded by the manifest (the topic object, a deletion) is written only after
  checking the owner in force (`OwnedPartition`). Damage is not a claim: a manifest that cannot be
  read fences nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from tierlog.broker.data_folder.bucket_state import OwnerEpochs
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.manifest import transitions
from tierlog.manifest.keys import PartitionKeys, topic_folder, topic_versions
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.object_store.store import IncompleteUpload, ObjectStore
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    FencedError,
    MissingObject,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

PAGE: Final = 1000
UPLOAD_PAGES_MAX: Final = 100


class TopicDeletion:
    """`run` raises FencedError if another folder owns a partition, and leaves the remaining
    objects; StoreUnavailable if the store still lists what it deleted.
    """

    def __init__(
        self, store: ObjectStore, topics: TopicObjects, partitions: Sequence[OwnedPartition]
    ) -> None:
        self._store, self._topics, self._partitions = store, topics, partitions

    def run(self, topic: TopicObject) -> None:
        self._mark_deleted(topic)
        for partition in self._partitions:
            partition.drop_all()
        refused = DeferredErrors(ConfigurationError)  # for objects that may not be deleted
        for partition in self._partitions:
            with refused:
                self._clear(partition)
        refused.raise_first()
        if not self._has_others(topic):
            self._topics.delete_versions(topic.name, topic.topic_id, check=self._check)

    def _has_others(self, topic: TopicObject) -> bool:
        """Whether objects of partitions remain, which other brokers of a cluster delete. Their
        folders are numbers, and sort before `topic/`.
        """
        versions = topic_versions(topic.name, topic.topic_id)
        first = self._store.list(topic_folder(topic.name, topic.topic_id), limit=1)
        return bool(first) and not first[0].key.startswith(versions)

    def _mark_deleted(self, topic: TopicObject) -> None:
        """Write the `deleted` version, unless an earlier attempt has."""
        with suppress(CorruptDataError):
            newest = self._topics.load_topic(topic.name, topic.topic_id)
            if newest is not None and newest.deleted:
                return
        self._topics.write_topic(msgspec.structs.replace(topic, deleted=True), check=self._check)

    def _check(self) -> None:
        for partition in self._partitions:
            partition.check()

    def _clear(self, partition: OwnedPartition) -> None:
        keys = partition.keys
        self._abort_uploads(partition)
        if len(self._store.list(keys.folder, limit=PAGE)) == PAGE:
            # The manifest goes last: it is how another owner is detected.
            for folder in (keys.segments, keys.pages, keys.pins):
                self._delete_below(folder, partition)
        self._delete_below(keys.folder, partition)

    def _abort_uploads(self, partition: OwnedPartition) -> None:
        """Abort incomplete uploads, page by page; stops if the store keeps listing aborted ones."""
        aborted: set[IncompleteUpload] = set()
        for _ in range(UPLOAD_PAGES_MAX):
            found = self._store.incomplete_uploads(partition.keys.folder, limit=PAGE)
            left = [upload for upload in found if upload not in aborted]
            if not left:
                return
            partition.check()
            for upload in left:
                self._store.abort_upload(upload)
            aborted.update(left)
        log.warning("incomplete uploads remain in the bucket", folder=partition.keys.folder)

    def _delete_below(self, folder: str, partition: OwnedPartition) -> None:
        deleted = ""
        while found := self._store.list(folder, limit=PAGE):
            if found[0].key == deleted:
                raise StoreUnavailable(f"{deleted}: still listed after the store deleted it")
            deleted = found[0].key
            partition.check()
            self._store.delete([stat.key for stat in found])


class OwnedPartition:
    """`claimant`: the folder; `recorded` returns the (owner, epoch) pairs that it claimed or saw.
    `seen`: the version of the last manifest that it saw.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        *,
        claimant: str,
        recorded: Callable[[], OwnerEpochs],
        seen: int,
        clock: Callable[[], int],
    ) -> None:
        self._manifests, self._recorded, self._seen = manifests, recorded, seen
        self._claimant, self._clock = claimant, clock

    @property
    def keys(self) -> PartitionKeys:
        return self._manifests.keys

    def check(self) -> Manifest | None:
        """The manifest in force, if there is one that can be read.

        Raises FencedError if its owner or epoch is not one that the folder recorded.
        """
        try:
            newest = self._newest()
        except CorruptDataError:
            return None
        if newest is not None:  # evaluated afterwards: a claim is recorded before it is sent
            transitions.check_recorded(newest, self._recorded(), claimant=self._claimant)
        return newest

    def to_delete(self, is_gone: Callable[[str], bool]) -> OwnedPartition | None:
        """In a cluster: this folder's, or in the name of a folder that `is_gone`; None if it is
        another's, who deletes it.
        """
        try:
            newest = self._newest()
        except CorruptDataError:
            return None
        if newest is not None and is_gone(holder := newest.assigned_to or newest.owner):
            held = frozenset({(newest.owner, newest.leader_epoch)})
            return OwnedPartition(
                self._manifests,
                claimant=holder,
                recorded=lambda: held,
                seen=self._seen,
                clock=self._clock,
            )
        with suppress(FencedError):
            self.check()
            return self
        return None

    def drop_all(self) -> None:
        """Commit, under the epoch in force, that the log is empty, so that no later manifest names
        an existing object. Raises FencedError as `check` does, ManifestConflict,
        OutcomeUnknownError.
        """
        in_force, now_ms = self.check(), self._clock()
        if in_force is None:
            return
        dropped = self._manifests.commit_manifest(
            in_force,
            lambda manifest: transitions.trim(
                manifest, manifest.end_offset, pages=self._manifests, now_ms=now_ms
            ),
        )
        if dropped is not in_force:
            self._manifests.confirm(dropped)
        self._seen = dropped.version

    def _newest(self) -> Manifest | None:
        try:
            return self._manifests.load_manifest(at_least=self._seen)
        except MissingObject:  # the version in force is gone: there may be another chain
            return self._manifests.load_manifest()
