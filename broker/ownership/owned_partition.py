"""A partition in the bucket, for a folder that believes itself the owner: what is beside the
manifest (the topic's own object, a deletion) is written only after checking who is the owner in
force.

* Damage is not a claim: a manifest that cannot be read does not stop anybody.
"""

from __future__ import annotations

from collections.abc import Callable

from broker.bucket_state import OwnerEpochs
from manifest import transitions
from manifest.keys import PartitionKeys
from manifest.state import Manifest
from manifest.store import ManifestStore
from record_format.errors import CorruptDataError, MissingObject


class OwnedPartition:
    """`recorded`: gives the (owner, epoch) pairs that the folder took or saw. `seen`: its last
    manifest's version.
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
        if newest is not None:  # asked behind it: a claim of ours that is under way is noted first
            transitions.check_recorded(newest, self._recorded())
        return newest

    def drop_all(self) -> None:
        """Commit, under the epoch in force, that the log is empty: no later manifest names an
        object of before. Raises FencedError as `check` does, ManifestConflict, OutcomeUnknownError.
        """
        in_force, now_ms = self.check(), self._clock()
        if in_force is None:
            return
        dropped = self._manifests.commit(
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
            return self._manifests.load(at_least=self._seen)
        except MissingObject:  # what was in force is gone: is there another chain?
            return self._manifests.load()
