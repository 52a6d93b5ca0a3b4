"""How long appends and flushes take; one instance is shared by all partitions of a broker."""

from __future__ import annotations

from record_format.latency_histogram import LatencyHistogram


class CommitTimes:
    """`write`: one write of all queued appends. `flush`: one flush. `commit`: an append with
    acks=all, from its submission until it was on the medium.
    """

    __slots__ = ("commit", "flush", "write")

    def __init__(self) -> None:
        self.write, self.flush, self.commit = (
            LatencyHistogram(),
            LatencyHistogram(),
            LatencyHistogram(),
        )
