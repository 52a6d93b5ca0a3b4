"""Gives a partition that one folder has alone a set of replicas, in which its replica is the only
one: from then on others are added and removed (`replication.reassigning`).

| step                                          | if this broker dies after it                 |
|-----------------------------------------------|----------------------------------------------|
| claim the manifest: what assigns it to        | nothing has changed                          |
| another folder cannot land any more           |                                              |
| refuse appends; wait for the accepted ones    | it restarts as the owner                     |
| keep that its replica is the only member      | it restarts as the owner, and forgets that   |
| record that it is not this folder's alone     | it restarts as a replica, and goes on here   |
| write the first version of the set            | as before: one that lands late says the same |
| claim it, under the next epoch; appends go on | it restarts as the only member of the set    |

* Only the owner does that. While it is down the partition stays as it is, and when it is back it is
  the owner: there is no set that it does not know of.
* The manifest exists before the set does, and nobody else may claim it by its rules. So whoever
  finds neither has found a new partition, and whoever finds a manifest alone waits for its owner.
* In a set of one all that is flushed is committed, as before. Another replica is one more member
  once it has all of that, and no sooner.
"""

from __future__ import annotations

from functools import partial

import structlog

from tierlog.broker.cluster.hand_over import STOP_S, HandOver
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas.replicas import Replicas
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.record_format.errors import InvalidRequest, LeaderUnknown, TierlogError

log = structlog.get_logger(__name__)


class FirstSets:
    """Thread-safe; one at a time for a partition, which is not handed over meanwhile."""

    def __init__(self, topics: LiveTopics, replicas: Replicas, hand_over: HandOver) -> None:
        self._topics, self._replicas, self._hand_over = topics, replicas, hand_over

    def begin_set(self, partition: Partition) -> Partition:
        """What serves it from now on. Raises LeaderUnknown if it has no set, or if the bucket did
        not answer in between: then nobody leads until it does. Raises what a claim does.
        """
        with self._hand_over.alone(partition):
            partition.check_writable()
            if not partition.offloads:
                raise InvalidRequest(f"{partition}: remote.storage.enable=false keeps it here")
            partition.claim()
            with partition.lasting:
                self._begin(partition)
        topic = self._topics.find_by_id(partition.topic_id)
        return topic.partition(partition.number)

    def _begin(self, partition: Partition) -> None:
        refusal = partial(LeaderUnknown, f"{partition} is given replicas", retry_after_s=1)
        try:
            if not partition.refuse_appends(refusal, timeout_s=STOP_S):
                raise LeaderUnknown(f"{partition}: appends do not end")
            self._replicas.begin_set(partition)
        except (TierlogError, OSError):
            partition.accept_appends()  # to be refused by what it is now, if it is not the owner
            raise
        log.info("a partition has a set of replicas", partition=str(partition))
