"""The manifest: a chain of its own, claimed by who leads, under the epoch that it leads under.

* What it names is committed, whoever wrote it and whenever it lands: a leader that was deposed
  names only what is below its own watermark.
* What a leader deletes from its disk is in a manifest that was read back. Followers delete it too.
"""

from __future__ import annotations

from tests.model.turns import Turns, spend
from tests.model.world import Manifest, Replica, Violation, World


class ManifestSteps(Turns):
    def claim_manifest(self, w: World, r: Replica) -> World | None:
        """On the newest, which it reads. Its log start is the leader's from then on."""
        if r.lead is None or not r.lead.is_claimed or r.manifest or r.offered:
            return None
        epoch = self.rules.manifest_epoch(r, w)
        if not self.rules.may_claim_manifest(w.manifest, epoch):
            return None
        before = w.manifest
        after = before._replace(version=before.version + 1, epoch=epoch, owner=r.me)
        return self._offer(w, r._replace(log_start=max(r.log_start, before.log_start)), after)

    def offload(self, w: World, r: Replica) -> World | None:
        left = spend(w, "offloads")
        if r.lead is None or r.manifest is None or r.offered or left is None:
            return None
        before = r.manifest
        end = max(len(before.cold), self.rules.offload_end(r))
        after = before._replace(
            version=before.version + 1,
            cold=r.log[:end],
            log_start=max(before.log_start, min(r.log_start, end)),
        )
        if after == before._replace(version=before.version + 1):
            return None
        return self._offer(w._replace(left=left), r, after)

    def _offer(self, w: World, r: Replica, after: Manifest) -> World:
        r = r._replace(offered=after)
        return w.with_replica(r, manifest_puts=w.manifest_puts | {after})

    def land_manifest(self, w: World, _: Replica | None = None) -> World | None:
        able = [put for put in w.manifest_puts if put.version == w.manifest.version + 1]
        if not able:
            return None
        put = self.choose(sorted(able))
        if put.epoch < w.manifest.epoch:
            raise Violation(f"the manifest's epoch falls from {w.manifest.epoch} to {put.epoch}")
        return w._replace(manifest=put)

    def settle_manifest(self, w: World, r: Replica) -> World | None:
        """Read back what has the number. Another leader's means: fenced, which ends no leadership;
        it claims anew if it leads, and finds out soon if it does not.
        """
        if r.offered is None or w.manifest.version < r.offered.version:
            return None
        mine = (w.manifest.owner, w.manifest.epoch) == (r.offered.owner, r.offered.epoch)
        return w.with_replica(r._replace(offered=None, manifest=w.manifest if mine else None))

    def delete_local(self, w: World, r: Replica) -> World | None:
        left = spend(w, "deletions")
        if r.lead is None or left is None:
            return None
        end = min(self.rules.removable_end(r), r.flushed)
        if end <= r.local_start:
            return None
        to = self.choose(range(end, r.local_start, -1))
        return w.with_replica(r._replace(local_start=to), left=left)
