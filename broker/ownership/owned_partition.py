"""A partition in the bucket, for a folder that believes itself the owner. Whatever is not guarded
by the manifest (the topic object, a deletion) is written only after checking the owner in force.

* Damage is not a claim: a manifest that cannot be read fences nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from tierlog.broker.bucket_state import OwnerEpochs
from tierlog.manifest import transitions
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore
from tierlog.record_format.errors import CorruptDataError, MissingObject


class OwnedPartition:
    """`recorded` returns the (owner, epoch) pairs that the folder claimed or saw. `seen`: the
    version of the last manifest that it saw.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        *,
        recorded: Callable[[], OwnerEpochs],
        seen: int,
        clock: Callable[[], int],
    ) -> None:
        self._manifests, self._recorded, self._seen = manifests, recorded, seen
        self._clock = clock

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
            transitions.check_recorded(newest, self._recorded())
        return newest

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
