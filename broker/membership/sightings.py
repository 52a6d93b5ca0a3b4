"""Whether a broker lives, by what another saw of its beats: pure.

* It lives unless two observations that are `session.timeout.ms` apart, on the observer's own
  monotonic clock, saw the same beat. No clock of another machine is compared.
* The first counts from when its answer was there, the second from when its request was sent: an
  answer may be as old as the request.
* They prove nothing unless the observer's own beats arrived meanwhile: the store may have been down
  for all, or the observer's machine may have slept.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tierlog.manifest.registrations import Alive

NEVER_MS: Final = -(2**63)


class Sighting(NamedTuple):
    """`since_ms`: when the answer that had this beat first was there. `unchanged_ms`: for how long
    it has been the same. `looked_ms`: when the last look began. `beat_after_ms`: the beat was
    written after this.
    """

    beat: Alive | None
    since_ms: int
    is_alive: bool = True
    is_first: bool = True
    unchanged_ms: int = 0
    looked_ms: int = NEVER_MS
    beat_after_ms: int = NEVER_MS

    @property
    def is_doubtful(self) -> bool:
        """Whether another look, soon, may tell more."""
        return self.is_alive and (self.is_first or self.unchanged_ms > 0)


class Look(NamedTuple):
    """`steady_since_ms`: since then the observer's own beats have arrived."""

    began_ms: int
    ended_ms: int
    steady_since_ms: int


def observe(
    seen: Sighting | None, beat: Alive | None, look: Look, *, session_timeout_ms: int
) -> Sighting:
    if seen is None or beat != seen.beat:
        return Sighting(
            beat,
            look.ended_ms,
            is_first=seen is None,
            looked_ms=look.began_ms,
            beat_after_ms=NEVER_MS if seen is None else seen.looked_ms,
        )
    unchanged_ms = max(0, look.began_ms - max(seen.since_ms, look.steady_since_ms))
    is_alive = seen.is_alive and unchanged_ms < session_timeout_ms
    return seen._replace(is_alive=is_alive, unchanged_ms=unchanged_ms, looked_ms=look.began_ms)
