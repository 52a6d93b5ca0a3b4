"""A broker's own place in the cluster: a data folder, registered under a node id.

* What a registration says is recorded in the folder before it is sent (`node`).
* A folder that has joined starts without the store, and registers when it answers.
* `membership_lost` says why this broker is a member no more: another folder has its node id, or it
  was removed. It then neither beats nor registers again, until a restart.
* A version is written every hour: so much can an older copy hide.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

import structlog
from msgspec.structs import replace

from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.membership.node import NODE, NodeRecord, Standing, refusal, standing_of
from tierlog.broker.settings import BrokerSettings
from tierlog.host.clock import monotonic_ms
from tierlog.host.threads import run_in_daemon_thread
from tierlog.manifest.registrations import Registered, Registration, Registrations, State
from tierlog.record_format.errors import (
    ConfigurationError,
    ManifestConflict,
    OutcomeUnknownError,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

ATTEMPTS: Final = 16
REGISTER_AGAIN_MS: Final = 3_600_000
_NOWHERE: Final = (None, "", "0.0.0.0", "::")  # noqa: S104  not listened on: refused
_NO_ANSWER: Final = (StoreUnavailable, OutcomeUnknownError)


@dataclass(frozen=True)
class Timing:
    """`clock`: of the wall, for people; `monotonic` measures."""

    clock: Callable[[], int]
    monotonic: Callable[[], int] = monotonic_ms
    pause: Callable[[float], None] = time.sleep


class OwnNode:
    """Thread-safe. Call `join` first."""

    def __init__(
        self,
        folder: DataFolder,
        store_status: StoreStatus,
        settings: BrokerSettings,
        timing: Timing,
    ) -> None:
        self._folder, self._store_status, self._settings = folder, store_status, settings
        self._timing, self._started_ms = timing, timing.clock()
        self._registrations = Registrations(store_status.store, pause=timing.pause)
        self._registering = threading.Lock()
        self._record: NodeRecord | None = None
        self._registered: Registration | None = None
        self._register_again_ms = -(2**63)
        self.membership_lost: str | None = None

    @property
    def registration(self) -> Registration:
        """The last that was written, or would have been if the store had answered."""
        assert self._registered is not None, "not joined"
        return self._registered

    # --- joining ----------------------------------------------------------------------------------

    def join(self, *, before_first: Callable[[], None] = lambda: None) -> None:
        """Register. Without the store, a folder that has joined goes on with what it recorded.
        `before_first` is called before a folder registers that was never in the cluster.

        Raises ConfigurationError, which says what to do, if another folder has the node id, if this
        one is an older copy or was removed, or if it has never joined and the store does not
        answer; CorruptDataError, OSError.
        """
        check_settings(self._settings)
        self._record = record = NODE.read_document(self._folder.path)
        self._check_node_id(record)
        try:
            if not self._store_status.is_verified:
                raise StoreUnavailable(self._store_status.unavailable or "it is not verified")
            if record is None:
                before_first()
            self._register_at_start()
        except _NO_ANSWER as error:
            if record is None or not record.joined or record.folder_id != self._folder.owner:
                raise ConfigurationError(
                    f"data folder {self._folder.path}: its first start with --join needs the store "
                    f"{self._store_status.store.url}: {error}"
                ) from error
            self._go_on_unregistered(record, error)

    def _check_node_id(self, record: NodeRecord | None) -> None:
        wanted = self._settings.node_id
        if record is not None and record.joined and wanted not in (None, record.node_id):
            raise ConfigurationError(
                f"data folder {self._folder.path} is of node {record.node_id}, not of "
                f"--node-id {wanted}: leave the flag out, or start an empty folder"
            )

    def _register_at_start(self) -> None:
        for node_id in self._candidates():
            if self._register_as(node_id):
                return
        raise AssertionError("there is always a free node id")

    def _candidates(self) -> Iterator[int]:
        """The one node id that this folder may have, or those that it takes if they are free."""
        if self._fixed_node_id is not None:
            yield self._fixed_node_id
            return
        tried = [] if self._record is None else [self._record.node_id]
        if not self._folder.is_new and self._folder.node_id is not None:
            tried.append(self._folder.node_id)
        yield from itertools.chain(tried, itertools.count())

    @property
    def _fixed_node_id(self) -> int | None:
        if self._record is not None and self._record.joined:
            return self._record.node_id
        return self._settings.node_id

    def _register_as(self, node_id: int) -> bool:
        """False if another folder has the node id, and it may be another one."""
        for _ in range(ATTEMPTS):
            newest = self._registrations.load_registration(node_id)
            record = self._recorded(node_id)
            standing = standing_of(newest.registration, record, folder_id=self._folder.owner)
            if standing not in (Standing.FREE, Standing.OURS):
                assert newest.registration is not None
                if self._fixed_node_id is None and standing is Standing.ANOTHERS:
                    return False
                self._check_may_replace(standing, newest.registration)
            before = 0 if newest.registration is None else newest.registration.incarnation
            incarnation = max(before, 0 if record is None else record.incarnation) + 1
            state: State = "draining" if record is not None and record.draining else "running"
            if self._write(newest, self._new_record(node_id, incarnation, record), state):
                log.info("joined the cluster", node_id=node_id, incarnation=incarnation)
                return True
        raise ManifestConflict(f"node {node_id}: {ATTEMPTS} conflicts in a row")

    def _recorded(self, node_id: int) -> NodeRecord | None:
        record = self._record
        return record if record is not None and record.node_id == node_id else None

    def _new_record(self, node_id: int, incarnation: int, record: NodeRecord | None) -> NodeRecord:
        return NodeRecord(
            node_id=node_id,
            folder_id=self._folder.owner,
            incarnation=incarnation,
            version=0,
            joined=record is not None and record.joined,
            draining=record is not None and record.draining,
        )

    def _check_may_replace(self, standing: Standing, newest: Registration) -> None:
        """Raise ConfigurationError unless this folder may register over another's registration."""
        needs_order = standing in (Standing.OLDER, Standing.REPLACED)
        is_refused = standing is Standing.REMOVED or (needs_order and not self._settings.take_over)
        is_live = not is_refused and newest.state != "stopped" and self._is_beating(newest)
        if is_refused or is_live:
            data_dir = self._folder.path
            raise ConfigurationError(refusal(standing, newest, data_dir=data_dir, is_live=is_live))
        if needs_order:
            self._folder.take_new_owner_id()

    def _is_beating(self, other: Registration) -> bool:
        """Watch it for `session.timeout.ms` at most."""
        log.info("is another broker running?", node_id=other.node_id, url=other.url)
        monotonic, first = self._timing.monotonic, self._registrations.find_beat(other)
        began_ms = monotonic()
        while monotonic() - began_ms < self._settings.session_timeout_ms:
            self._timing.pause(self._settings.heartbeat_interval_ms / 4000)
            if self._registrations.find_beat(other) != first:
                return True
        return False

    def _go_on_unregistered(self, record: NodeRecord, error: Exception) -> None:
        if self._record is record:  # otherwise this start's incarnation is recorded
            self._save(replace(record, incarnation=record.incarnation + 1))
        assert self._record is not None
        state: State = "draining" if record.draining else "running"
        self._registered = self._registration(self._record, state)
        log.warning("not registered yet: the store does not answer", error=str(error))

    # --- registering ------------------------------------------------------------------------------

    def set_state(self, state: Literal["running", "draining", "stopped"]) -> None:
        """Write a registration that says so. `draining` outlives restarts, until `running`.

        Raises StoreUnavailable, OutcomeUnknownError, ManifestConflict, ConfigurationError if the
        membership is lost, OSError.
        """
        with self._registering:
            assert self._record is not None, "not joined"
            if state != "stopped":
                self._save(replace(self._record, draining=state == "draining"))
            self._register(state)

    def register_if_due(self) -> None:
        """Each hour, and once the store answers. Raises what `set_state` raises."""
        with self._registering:
            if self._timing.monotonic() >= self._register_again_ms:
                self._register(self.registration.state)

    def _register(self, state: State) -> None:
        assert self._record is not None, "not joined"
        for _ in range(ATTEMPTS):
            newest = self._registrations.load_registration(self._record.node_id)
            self._check_own(newest.registration)
            # A number can also be free because its version was deleted while this broker slept.
            if (
                self._write(newest, self._record, state)
                and self._registrations.collect_versions(self._record.node_id) == newest.taken + 1
            ):
                return
        raise ManifestConflict(f"node {self._record.node_id}: {ATTEMPTS} conflicts in a row")

    def _write(self, newest: Registered, record: NodeRecord, state: State) -> bool:
        """Whether the next version is in the bucket."""
        record = replace(record, version=newest.taken + 1)
        self._save(record)
        registration = self._registration(record, state)
        if not self._registrations.write_registration(registration):
            return False
        if not record.joined:
            self._save(replace(record, joined=True))
        self._folder.take_node_id(record.node_id)
        self._registered = registration
        self._register_again_ms = self._timing.monotonic() + REGISTER_AGAIN_MS
        return True

    def _save(self, record: NodeRecord) -> None:
        NODE.write_document(self._folder.path, record, write=self._folder.write)
        self._record = record

    def _registration(self, record: NodeRecord, state: State) -> Registration:
        settings = self._settings
        assert settings.advertised_url is not None, "checked"
        return Registration(
            node_id=record.node_id,
            folder_id=record.folder_id,
            incarnation=record.incarnation,
            url=settings.advertised_url,
            kafka=settings.advertised_kafka,
            zone=settings.broker_zone or "",
            state=state,
            started_ms=self._started_ms,
            version=record.version,
        )

    def _check_own(self, newest: Registration | None) -> None:
        """Raise ConfigurationError, and for ever, if another folder registered as this node."""
        self.note_newest(newest)
        if self.membership_lost is not None:
            raise ConfigurationError(self.membership_lost)

    def note_newest(self, newest: Registration | None) -> None:
        """Find out whether the node id is still this folder's."""
        record = self._record
        assert record is not None, "not joined"
        standing = standing_of(newest, record, folder_id=record.folder_id)
        if newest is None or standing in (Standing.FREE, Standing.OURS):
            return
        if self.membership_lost is None:
            is_live = standing is not Standing.REMOVED
            reason = refusal(standing, newest, data_dir=self._folder.path, is_live=is_live)
            log.error("membership lost", node_id=record.node_id, reason=reason)
            self.membership_lost = reason

    def leave(self, timeout_s: float) -> None:
        """A clean stop: say so, if the store answers in time. Call it once no beat is sent."""
        if self.membership_lost is not None or not self._store_status.is_reachable:
            return
        try:
            stop = lambda: self.set_state("stopped")  # noqa: E731
            run_in_daemon_thread(stop, name="leave").result(timeout_s)
        except (TierlogError, OSError, TimeoutError) as error:
            log.warning("the clean stop is not registered", error=str(error))


def check_settings(settings: BrokerSettings) -> None:
    """Raise ConfigurationError."""
    if settings.allow_single_writer_store:
        raise ConfigurationError(
            "--join needs a store with atomic conditional writes: leave out "
            "--allow-single-writer-store"
        )
    url = settings.advertised_url or ""
    if not url.startswith(("http://", "https://")) or _host(url) in _NOWHERE:
        raise ConfigurationError(
            "--join needs advertised.url, as in http://broker-1:8640: the other brokers cannot "
            f"reach {url!r}"
        )
    kafka = settings.advertised_kafka
    if kafka and _host(f"//{kafka}") in _NOWHERE:
        raise ConfigurationError(
            "--join needs kafka.advertised, as in broker-1:9092: Kafka clients cannot reach "
            f"{kafka}"
        )
    if settings.session_timeout_ms < 2 * settings.heartbeat_interval_ms:
        raise ConfigurationError(
            f"session.timeout.ms ({settings.session_timeout_ms}) is below twice "
            f"heartbeat.interval.ms ({settings.heartbeat_interval_ms}): a living broker would seem "
            "dead"
        )


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # half an IPv6 address
        return None
