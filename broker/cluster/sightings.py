"""Whether a broker lives, by what another saw of its beats: pure.

* It lives unless two observations that are `session.timeout.ms` apart, on the observer's own
  monotonic clock, saw the same beat. No clock of another machine is compared.
* The first counts from when its answer was there, the second from when its request was sent: an
  answer may be as old as the request.
* They prove nothing unless the observer's own beats arrived meanwhile: the store may have been down
  for all, or the observer's machine may have slept.
"""

from __future__ import annotations

from typing import NamedTuple

from tierlog.manifest.registrations import Alive


class Sighting(NamedTuple):
    """`since_ms`: when the answer that had this beat first was there. `unchanged_ms`: for how long
    it has been the same.
    """

    beat: Alive | None
    since_ms: int
    is_alive: bool = True
    is_first: bool = True
    unchanged_ms: int = 0

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
        return Sighting(beat, look.ended_ms, is_first=seen is None)
    unchanged_ms = max(0, look.began_ms - max(seen.since_ms, look.steady_since_ms))
    is_alive = seen.is_alive and unchanged_ms < session_timeout_ms
    return seen._replace(is_alive=is_alive, unchanged_ms=unchanged_ms)
