"""What a follower asks a leader, and is answered: `POST /v1/replica/fetch` (docs/cluster.md).

* What a fetch says of a partition is where its replica is, not what has changed of that, so that
  one that is lost or comes twice does no harm. The first fetch of a session names each partition
  that the follower has of this leader, later ones those that have news (`fetch_sessions`).
* An answer has a row only for a partition of which there is something to say; the batches of all
  rows follow the head, in the order of the rows.
* Offsets are those of the log: nothing here knows where or how they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from tierlog.host.file_slice import FileSlice

WAIT_MAX_MS: Final = 60_000
NO_SESSION: Final = 0
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
OrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # -1: there is none
Name = Annotated[str, Meta(max_length=200)]
FetchError = Literal[
    "", "not-leader", "fenced-leader-epoch", "unknown-partition", "offset-out-of-range"
]
NONE: Final[FetchError] = ""
OUT_OF_RANGE: Final[FetchError] = "offset-out-of-range"


class PartitionFetch(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """One partition. `seen`: the highest leader epoch that the follower knows of; `last_epoch` and
    `end_offset`: where its log ends; `flushed_end`: up to where it is on the medium; `answered`:
    the number of the last answer that it took in, or 0; `high_watermark`: below it all is known
    to be committed.
    """

    topic_id: Name
    partition: Count
    replica_id: Name
    leader_epoch: OrNone
    seen: OrNone
    last_epoch: OrNone
    end_offset: Count
    flushed_end: Count
    log_start_offset: Count
    answered: Count
    high_watermark: Count


class ReplicaFetch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wait_ms`: how long the leader may wait for something to say, other than a watermark, which
    is told along, or once nothing is waited for; `max_bytes`: of all batches
    together. A row whose first batch is larger than what is left of them has that batch alone, and
    no row after it has any: more is refused. `session_id`: of whose fetches this is number
    `number`; 0 begins a session, with `number` 0. `forgotten`: topic ids and partitions that are
    not in it any more.
    """

    node_id: Count
    session_id: Count = NO_SESSION
    number: Count = 0
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MAX_MS)]
    max_bytes: Count
    partitions: list[PartitionFetch]
    forgotten: list[tuple[Name, Count]] = []


class PartitionAnswer(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """One partition. `number`: of this answer, in this term; `size_bytes`: of its batches, which
    are all of the segment that begins at `segment_base_offset`: the follower rolls there first.
    `diverging`: the epoch, and its end offset, to cut the log to. After `offset-out-of-range` the
    follower begins at `local_log_start_offset`.
    """

    topic_id: Name
    partition: Count
    leader_epoch: OrNone
    number: Count
    high_watermark: Count
    log_start_offset: Count
    local_log_start_offset: Count
    segment_base_offset: OrNone = -1
    size_bytes: Count = 0
    diverging: tuple[OrNone, Count] | None = None
    error: FetchError = NONE

    @property
    def is_refusal(self) -> bool:
        """It does not lead, or not this replica, or not under that epoch."""
        return self.error not in (NONE, OUT_OF_RANGE)


class FetchHead(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """What an answer begins with. `session_id`: of the session in which the next fetch is; 0 for
    none. If it is not the one that was fetched in, nothing of that fetch counts.
    """

    session_id: Count
    partitions: list[PartitionAnswer]


class Answered(NamedTuple):
    """What a leader has to say of a partition; whoever is given it closes the slices. `may_wait`:
    for something else to be said.
    """

    answer: PartitionAnswer
    slices: Sequence[FileSlice] = ()
    may_wait: bool = False


class Fetched(NamedTuple):
    """The same as its follower receives it. `batches` has `answer.size_bytes` bytes."""

    answer: PartitionAnswer
    batches: memoryview


class FetchedRows(NamedTuple):
    """A whole answer; `session_id` as in its head."""

    session_id: int
    rows: list[Fetched]


class ShownSet(NamedTuple):
    """A partition's replicas as its leader last reported them; all are node ids. `leader`: None
    while nobody is known to lead. `lags`: by how many offsets each replica is behind the leader's
    log end, -1 if it has not said so in this term; none while nobody leads. `adding`, `removing`:
    those of a reassignment, which are among the replicas. `has_store`: the bucket is in sync too.
    """

    leader_epoch: int
    leader: int | None
    replicas: list[int]
    in_sync: list[int]
    lags: list[int]
    adding: Sequence[int] = ()
    removing: Sequence[int] = ()
    has_store: bool = False

    @property
    def wanted(self) -> list[int]:
        """The replicas that there are to be."""
        return [one for one in self.replicas if one not in self.removing]


class Taken(Protocol):
    """A fetch that counts. `session_id`: as in the answer's head."""

    @property
    def session_id(self) -> int: ...

    def answer(self, *, is_over: bool) -> list[Answered]:
        """What there is to say now: nothing, if the list is empty. `is_over`: it is waited for no
        longer. It may wait for the disk.
        """
        ...

    def wait_for_news(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back, from any thread, when there may be something to say: at once, if there may be
        already. Returns how to give up waiting, which may be called at any time.
        """
        ...


class Replicas(Protocol):
    """The replicas of this broker, as requests use them: `replicas.replicas`."""

    def take_fetch(self, request: ReplicaFetch) -> Taken | None:
        """None if it is not the next of its session: nothing of it counts. It may wait for the
        disk.
        """
        ...
