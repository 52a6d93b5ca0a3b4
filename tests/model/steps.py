"""What may happen next, one function each: a step takes a world, and whose turn it is, and returns
the world after it, or None if it cannot happen.

* What is left to chance goes through `pick`, so that a walk may draw and a search may try all.
* A process may stop between any two steps: no step both sends something and learns its fate.
  But for a claimant's own objects in the bucket, to which nothing refers before its claim.
* Time-outs are not modelled: whoever may try, may try at any time (`checks` has the time-outs).
"""

from tests.model.leader_steps import LeaderSteps
from tests.model.manifest_steps import ManifestSteps
from tests.model.replica_steps import ReplicaSteps
from tests.model.store_steps import StoreSteps


class Steps(ReplicaSteps, LeaderSteps, ManifestSteps, StoreSteps):
    """All of them."""
