"""The brokers of the cluster as this one sees them, and its own place among them.

| call          | requests                                 | when                         |
|---------------|------------------------------------------|------------------------------|
| `join`        | a few                                    | before the topics are opened |
| `beat`        | one PUT; a few where it has to register  | each `heartbeat.interval.ms` |
| `look_around` | as `refresh`, or none                    | twice a second               |
| `refresh`     | one LIST, and a GET for each running one | on demand                    |
| `set_state`   | a few                                    | by an operator, at the end   |
| `remove`      | a few                                    | by an operator               |
| all others    | none                                     |                              |

* Its own place is `own_node`'s; this file looks at the others.
* Who is alive is decided by beats alone (`sightings`), and is good for choosing and showing; what
  is true is decided by conditional creates.
* A beat vouches for the disk and the event loop: there is none while a write or a flush has hung
  for `HANGS_S`, or the loop has not run for so long. A disk that nobody asks is not looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import structlog
from msgspec.structs import replace

from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.membership.own_node import ATTEMPTS, OwnNode, Timing
from tierlog.broker.membership.sightings import NEVER_MS, Look, Sighting, observe
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.registrations import Alive, Registered, Registration, Registrations, State
from tierlog.record_format.errors import (
    BrokerInUse,
    ManifestConflict,
    RetriableError,
    UnknownBroker,
)

log = structlog.get_logger(__name__)

LOOK_PACE_MS: Final = 6_000  # for each request of a refresh, when nothing is in doubt
HANGS_S: Final = 10.0


class Member(NamedTuple):
    """`kafka`: HOST:PORT that Kafka clients are given, or empty."""

    node_id: int
    folder_id: str
    url: str
    kafka: str
    zone: str
    state: State
    incarnation: int
    is_alive: bool


class Members:
    """Thread-safe. Call `join` first."""

    def __init__(
        self,
        folder: DataFolder,
        store_status: StoreStatus,
        settings: BrokerSettings,
        timing: Timing,
    ) -> None:
        self._store_status, self._settings, self._timing = store_status, settings, timing
        self._own = OwnNode(folder, store_status, settings, timing)
        self._registrations = Registrations(store_status.store, pause=timing.pause)
        self._refreshing = threading.Lock()
        self._me: tuple[Registration, Member] | None = (
            None  # asked for some thousand times a second
        )
        self._others: dict[int, Member] = {}
        self._by_folder: dict[str, Member] = {}
        self._sightings: dict[int, Sighting] = {}
        self._readable: dict[int, Registration] = {}
        self._problems: dict[int, str] = {}
        self._looked_ms = self._look_again_ms = self._doubted_ms = NEVER_MS
        self._beats = 0
        self._last_beat_ms: int | None = None
        self._steady_since_ms = 0
        self._watched: list[tuple[str, Callable[[], float]]] = []

    # --- who there is -----------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        known = self._me
        registration, is_alive = self._own.registration, self.membership_lost is None
        if known is None or known[0] is not registration or known[1].is_alive is not is_alive:
            known = self._me = registration, _member(registration, is_alive=is_alive)
        return known[1]

    @property
    def membership_lost(self) -> str | None:
        """Why this broker is a member no more."""
        return self._own.membership_lost

    def members(self) -> list[Member]:
        """All that are registered and not removed, this broker too, by node id."""
        return sorted([*self._others.values(), self.me])

    def member(self, node_id: int) -> Member | None:
        return self.me if node_id == self.me.node_id else self._others.get(node_id)

    def find_member(self, node_id: int) -> Member:
        """Raises UnknownBroker."""
        if (found := self.member(node_id)) is None:
            raise UnknownBroker(f"no broker of the cluster has the node id {node_id}")
        return found

    def member_of(self, folder_id: str) -> Member | None:
        """The broker of this data folder."""
        is_mine = self._own.registration.folder_id == folder_id
        return self.me if is_mine else self._by_folder.get(folder_id)

    # --- the own place ----------------------------------------------------------------------------

    def join(self, *, before_first: Callable[[], None] = lambda: None) -> None:
        """As `OwnNode.join`."""
        self._own.join(before_first=before_first)

    def set_state(self, state: Literal["running", "draining", "stopped"]) -> None:
        """As `OwnNode.set_state`."""
        self._own.set_state(state)

    def leave(self, timeout_s: float) -> None:
        """As `OwnNode.leave`."""
        self._own.leave(timeout_s)

    def remove(self, node_id: int, *, check_unused: Callable[[str], None]) -> None:
        """Have another broker, which does not run, leave for ever. `check_unused` is given its
        data folder, and raises if it is still needed.

        Raises UnknownBroker, BrokerInUse, ManifestConflict, StoreUnavailable, OutcomeUnknownError.
        """
        for _ in range(ATTEMPTS):
            self.refresh()
            if (member := self.find_member(node_id)).is_alive:
                raise BrokerInUse(f"broker {node_id} at {member.url} runs: drain and stop it first")
            check_unused(member.folder_id)
            if self._write_removed(member):
                return self.refresh()
        raise ManifestConflict(f"node {node_id}: {ATTEMPTS} conflicts in a row")

    def _write_removed(self, member: Member) -> bool:
        """False if it has registered meanwhile."""
        newest = self._registrations.load_registration(member.node_id)
        if newest.registration is None or newest.registration.incarnation != member.incarnation:
            return False
        removed = replace(newest.registration, state="removed", version=newest.taken + 1)
        return self._registrations.write_registration(removed)

    # --- beats ------------------------------------------------------------------------------------

    def watch_for_hangs(self, hangs: str, wait_s: Callable[[], float]) -> None:
        """Do not beat while something has owed an answer for HANGS_S; `hangs` says what."""
        self._watched.append((hangs, wait_s))

    def beat(self) -> None:
        """Tell the others that this broker lives; register if that is due.

        Raises RetriableError if its disk or its event loop hangs, and what `set_state` raises.
        """
        if self.membership_lost is not None:
            return
        for hangs, wait_s in self._watched:
            if (waited_s := wait_s()) > HANGS_S:
                raise RetriableError(f"{hangs} for {waited_s:.0f} s")
        self._store_status.require_store()
        self._own.register_if_due()
        me, self._beats = self.me, self._beats + 1
        self._registrations.write_beat(
            Alive(
                node_id=me.node_id,
                folder_id=me.folder_id,
                incarnation=me.incarnation,
                beat=self._beats,
            )
        )
        now_ms = self._timing.monotonic()
        if not self._is_steady(now_ms):
            self._steady_since_ms = now_ms
        self._last_beat_ms = now_ms

    def _is_steady(self, now_ms: int) -> bool:
        last_ms = self._last_beat_ms
        return last_ms is not None and now_ms - last_ms < self._settings.session_timeout_ms

    def look_around(self) -> None:
        """`refresh` if it is due: at rest so that the requests of one broker are few however many
        there are; sooner while somebody's death is in doubt.
        """
        if self._timing.monotonic() >= self._look_again_ms:
            self.refresh()

    def doubt(self) -> None:
        """A broker does not answer: `look_around` now, or soon after the last look, and go on until
        its beats have decided.
        """
        self._doubted_ms = self._timing.monotonic()
        again_ms = self._looked_ms + self._settings.session_timeout_ms // 2
        self._look_again_ms = min(self._look_again_ms, again_ms)

    def has_beaten_since(self, node_id: int, since_ms: int) -> bool:
        """Whether a beat of another broker was seen that was written after this."""
        sighting = self._sightings.get(node_id)
        return sighting is not None and sighting.beat_after_ms > since_ms

    def refresh(self) -> None:
        """Read the registrations, and the beats of all that should have one.

        Raises StoreUnavailable.
        """
        self._store_status.require_store()
        with self._refreshing:
            found = self._registrations.load_registrations()
            self._report_problems(found)
            if (own := found.get(self.me.node_id)) is not None:
                self._own.note_newest(own.registration)
            others, sightings = dict[int, Member](), dict[int, Sighting]()
            for node_id, one in found.items():
                other = self._readable.get(node_id) if one.problem else one.registration
                if node_id == self.me.node_id or other is None or other.state == "removed":
                    continue
                self._readable[node_id] = other
                others[node_id] = self._look_at(other, sightings)
            self._others, self._sightings = others, sightings
            self._by_folder = {one.folder_id: one for one in others.values()}
            self._looked_ms = self._timing.monotonic()
            self._look_again_ms = self._next_look_ms()

    def _look_at(self, other: Registration, sightings: dict[int, Sighting]) -> Member:
        if other.state == "stopped":
            return _member(other, is_alive=False)
        began_ms = self._timing.monotonic()
        beat = self._registrations.find_beat(other)
        ended_ms = self._timing.monotonic()
        steady_since_ms = self._steady_since_ms if self._is_steady(ended_ms) else ended_ms
        look = Look(began_ms, ended_ms, steady_since_ms)
        timeout_ms = self._settings.session_timeout_ms
        before = self._sightings.get(other.node_id)
        sighting = observe(before, beat, look, session_timeout_ms=timeout_ms)
        sightings[other.node_id] = sighting
        if before is not None and before.is_alive != sighting.is_alive:
            seen = "broker is back" if sighting.is_alive else "broker does not beat"
            log.warning(seen, node_id=other.node_id, url=other.url)
        return _member(other, is_alive=sighting.is_alive)

    def _next_look_ms(self) -> int:
        """At rest at a pace that grows with the number of brokers; while somebody's death is in
        doubt as soon as another look can decide it.
        """
        now_ms, timeout_ms = self._timing.monotonic(), self._settings.session_timeout_ms
        doubtful = [one for one in self._sightings.values() if one.is_doubtful]
        if not doubtful:
            if now_ms - self._doubted_ms < timeout_ms:  # it has beaten since the look before
                return now_ms + timeout_ms // 2
            return now_ms + max(timeout_ms, LOOK_PACE_MS * (1 + len(self._sightings)))
        since_ms = max(self._steady_since_ms, min(one.since_ms for one in doubtful))
        decided_ms = since_ms + timeout_ms
        return decided_ms if decided_ms > now_ms else now_ms + timeout_ms // 2

    def _report_problems(self, found: dict[int, Registered]) -> None:
        problems = {node_id: one.problem for node_id, one in found.items() if one.problem}
        for node_id, problem in problems.items():
            if self._problems.get(node_id) != problem:
                log.error("registration cannot be read", node_id=node_id, error=problem)
        self._problems = problems


def _member(one: Registration, *, is_alive: bool) -> Member:
    return Member(
        node_id=one.node_id,
        folder_id=one.folder_id,
        url=one.url,
        kafka=one.kafka,
        zone=one.zone,
        state=one.state,
        incarnation=one.incarnation,
        is_alive=is_alive,
    )
