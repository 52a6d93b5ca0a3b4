"""Claims that no rule allows, but an operator: `cluster/forced-claims/<version>.json`, kind
`forced-claim`.

* One is written before each claim by a folder that the manifest in force does not know: a
  take-over, the first start after a restore. So who owns a thousand partitions asks for all of them
  at once whether any was taken: by a HEAD of the next number.
* None is ever deleted: a number that is free again would hide a claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from tierlog.manifest.keys import BROKERS, FORCED_CLAIMS
from tierlog.manifest.store import random_name
from tierlog.manifest.versions import VersionChain
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json

KIND_FORCED_CLAIM: Final = "forced-claim"
MAX_CLAIM_BYTES: Final = 64 * 1024
ATTEMPTS: Final = 64


class ForcedClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`owner`: the folder that is about to claim the partition."""

    topic_id: str
    partition: int
    owner: str
    version: int
    nonce: str


def announce_forced_claim(store: ObjectStore, topic_id: str, partition: int, owner: str) -> None:
    """Call it before a claim that breaks the rules: brokers of a cluster do not look at each
    manifest. Where there is no cluster, nothing is written. Raises as `write_forced_claim` does.
    """
    if store.list(BROKERS, limit=1):
        ForcedClaims(store).write_forced_claim(topic_id, partition, owner)


class ForcedClaims:
    """Thread-safe."""

    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._store = store
        self._chain = VersionChain(store, FORCED_CLAIMS, max_bytes=MAX_CLAIM_BYTES, pause=pause)

    def write_forced_claim(self, topic_id: str, partition: int, owner: str) -> int:
        """Its number. Raises OutcomeUnknownError, ManifestConflict, StoreUnavailable: not claimed
        yet; repeat. A second one for the same claim does no harm.
        """

        def claim(version: int) -> ForcedClaim:
            return ForcedClaim(
                topic_id=topic_id,
                partition=partition,
                owner=owner,
                version=version,
                nonce=random_name(),
            )

        return self._chain.append_version(claim, _sealed, attempts=ATTEMPTS).version

    def newest(self) -> int:
        """The number of the newest claim; 0 if there is none."""
        return self._chain.newest_version()

    def find_newer(self, than: int) -> int:
        """The number of the newest claim, `than` if there is none above it: then one HEAD.

        Void versions count too: their writers go on to the next number.
        """
        if self._store.head(self._chain.key(than + 1)) is None:
            return than
        return self._chain.newest_version(at_least=than + 1)


def _sealed(claim: ForcedClaim) -> bytes:
    return sealed_json.encode(claim, kind=KIND_FORCED_CLAIM)
