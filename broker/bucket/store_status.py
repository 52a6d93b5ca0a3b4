"""Whether the store can be used: it is this cluster's, passes the probe, and responds.

| call             | contacts the store            | for                                          |
|------------------|-------------------------------|----------------------------------------------|
| `is_reachable`   | never                         | work that would rather wait than time out    |
| `recheck`        | unless known unreachable      | a failure: was it the store?                 |
| `poll`           | now and then, with back-off   | the background round that publishes topics   |
| `require_store`  | until it was verified once    | anything that needs the store now            |

* Nothing is written below the prefix before the store is verified: its `cluster.json` has this
  cluster's id, this version reads its format level, and the probe found that it keeps its promises.
  Verified once, it stays so; from then on only reachability is observed.
* A verified bucket has at least the folder's format level, so it may hold what the broker writes.
* A store that was unreachable at the start is verified in the background (`poll`). If it is then
  refused (another cluster's prefix, no access), it is not used, and `/readyz` says so, until a
  complete verification, repeated with back-off, succeeds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog

from tierlog.broker.data_folder.bucket_state import has_bucket
from tierlog.broker.data_folder.data_folder import DataFolder, Document, unusable
from tierlog.broker.settings import BrokerSettings
from tierlog.host.retry import backoff_s
from tierlog.host.threads import run_in_daemon_thread
from tierlog.manifest.bucket_level import BucketLevel
from tierlog.manifest.keys import CLUSTER_KEY
from tierlog.manifest.topic_objects import (
    MAX_TOPIC_BYTES,
    Cluster,
    create_cluster,
    load_sealed_cluster,
)
from tierlog.object_store.probe import RACE_S, StoreTraits, probe, still_has_traits
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    CorruptDataError,
    CorruptObject,
    MissingObject,
    StoreUnavailable,
    TierlogError,
)
from tierlog.record_format.format_level import FIRST_LEVEL

log = structlog.get_logger(__name__)

T = TypeVar("T")

FOLDER_RACE_S: Final = 0.0  # one round of larger bodies: creating is link(2), whatever their size
PROBE_KEPT_MS: Final = 7 * 86_400_000
POLL_S: Final = 15.0  # a store that responded
RETRY_S: Final = 2.0  # one that did not, or that has failed a request since
REFUSED_MAX_S: Final = 60.0  # back-off: the probe races eight writers, and a refusal may stay


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found. `store`: its URL, and whether a single writer was promised. `place`:
    also the server.
    """

    store: tuple[str, bool]
    place: str = ""
    traits: StoreTraits
    probed_ms: int


PROBE: Final = Document("store.json", "store-probe", ProbeResult)


class _Refusal(NamedTuple):
    reason: str
    times: int
    verify_again_s: float


class StoreStatus:
    """Thread-safe; one verification at a time. `traits`: the store's, once it is verified.
    `refusal`, `unavailable`: the reason, or None.
    """

    def __init__(
        self,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
    ) -> None:
        self._folder, self.store, self._settings, self._clock = folder, store, settings, clock
        self._verifying, self._marking = threading.Lock(), threading.Lock()
        self._failed: StoreUnavailable | None = None
        self.traits: StoreTraits | None = None
        self._refused: _Refusal | None = None
        self.unavailable: str | None = None
        self._clock_refusal: str | None = None  # until the store serves a request again
        self._polled_s = float("-inf")
        self._failures_seen = 0

    @property
    def is_verified(self) -> bool:
        return self.traits is not None

    def reads_back(self) -> bool:
        """Whether what is uploaded is read back whole: the store's own checksums are not enough."""
        assert self.traits is not None, "nothing is uploaded before the store is verified"
        return self.traits.read_back_whole

    @property
    def is_reachable(self) -> bool:
        """As last observed; does not contact the store."""
        return self.unavailable is None

    @property
    def refusal(self) -> str | None:
        refused = self._refused  # once: another thread may accept the store
        return None if refused is None else refused.reason

    @property
    def trouble(self) -> str | None:
        """For people: why nothing goes to the store at the moment."""
        waits = "; it refused the clock: nothing expires by age" if self._clock_refusal else ""
        if refusal := self.refusal:
            return f"store refused: {refusal}{waits}"
        if self.unavailable is None:
            return None
        return f"store unavailable: {self.unavailable}{waits}"

    def recheck(self) -> bool:
        """Contact the store, unless it is known to be unreachable; whether it is reachable."""
        if self.is_reachable:
            self._ping()
        return self.is_reachable

    def verify_at_start(self, *, timeout_s: float) -> None:
        """As `verify`, but the store may be unreachable. Raises ConfigurationError."""
        try:
            run_in_daemon_thread(self.verify, name="store-check").result(timeout_s)
        except TimeoutError:
            self.mark_unavailable(StoreUnavailable(f"no result within {timeout_s:g} s"))
        except StoreUnavailable as error:
            self.mark_unavailable(error)

    def poll(self) -> bool:
        """Verify the store, or observe whether it still responds, when that is due. Returns False
        if it was refused. Raises StoreUnavailable.
        """
        refused = self._refused
        if refused is not None and time.monotonic() < refused.verify_again_s:
            return False
        try:
            self.verify()
        except ConfigurationError as error:
            self._mark_refused(error)
            return False
        except StoreUnavailable as error:
            self.mark_unavailable(error)
            raise
        self._ping_if_due()
        return True

    def verify(self) -> None:
        """Verify that the store passes the probe and that the prefix is this cluster's, until that
        succeeded once. Raises StoreUnavailable, ConfigurationError.

        A caller that waited for another's failed verification gets its error, because a request may
        take a minute to time out.
        """
        failed = self._failed
        with self._verifying:
            if self.is_verified:
                return
            if self._failed is not None and self._failed is not failed:
                raise StoreUnavailable(str(self._failed)) from self._failed
            try:
                self._verify()
            except StoreUnavailable as error:
                self._failed = error
                raise

    def _verify(self) -> None:
        known = PROBE.read_document(self._folder.path)
        was_used = known is not None and known.store[0] == self.store.url
        load_cluster = partial(load_sealed_cluster, self.store)
        found, sealed = self._readable(load_cluster, was_used=was_used) or (None, b"")
        joins = self._settings.cluster_join and known is None and not self._folder.has_topics
        if found is not None and found.cluster_id != self._folder.cluster_id:
            if not joins:
                raise ConfigurationError(self._foreign_cluster(found))
            self._folder.join_cluster(found.cluster_id)
        if found is None and was_used:
            raise StoreUnavailable(
                f"{self.store.url} has no {CLUSTER_KEY}, although this data folder has used it: "
                "is it the right bucket, and is it mounted?"
            )
        level = BucketLevel(self.store)
        found_level = FIRST_LEVEL
        if found is not None:
            found_level = self._readable(level.read_level, was_used=was_used)
        traits = self._probe(known, sealed)
        if found is None:
            ours = Cluster(cluster_id=self._folder.cluster_id, created_ms=self._clock())
            created = create_cluster(self.store, ours, joins=joins)
            if created.cluster_id != ours.cluster_id:  # several brokers start on a new prefix
                self._folder.join_cluster(created.cluster_id)
        if found_level < self._folder.level:
            level.raise_level(self._folder.level)
        if known is None or known.traits is not traits:
            # Last: from here on, a store without `cluster.json` is not a new one.
            try:
                self._save_probe(traits)
            except OSError as error:  # of a full disk; then the next start probes again
                if not was_used:
                    raise StoreUnavailable(f"its probe cannot be recorded: {error}") from error
        if self._refused is not None:
            log.info("store accepted", store=self.store.url)
        self.traits, self._refused = traits, None
        self._mark_available()

    def _readable(self, read: Callable[[], T], *, was_used: bool) -> T:
        """A store that was good once and answers nonsense now is down, like one that is silent."""
        try:
            return read()
        except CorruptDataError as error:
            reason = f"store {self.store.url}: {error}; is another kind of server listening there?"
            if was_used:
                raise StoreUnavailable(reason) from error
            raise ConfigurationError(reason) from error

    def check_clock(self) -> None:
        """As `recheck`. Raises ClockSkewTooLarge if the store refuses this machine's clock, or did
        when it last responded.
        """
        self.recheck()
        if self._clock_refusal is not None:
            raise ClockSkewTooLarge(self._clock_refusal)

    def require_store(self) -> ObjectStore:
        """The store, verified. Raises StoreUnavailable, ConfigurationError."""
        if (refusal := self.refusal) is not None:
            raise ConfigurationError(refusal)
        self.verify()
        return self.store

    def _probe(self, known: ProbeResult | None, sealed: bytes) -> StoreTraits:
        """The store's traits. `sealed`: the bytes of `cluster.json`.

        It is probed again if it is another store, the result is a week old, or a quick check finds
        that the result no longer holds.
        """
        single, existing = self._settings.allow_single_writer_store, (CLUSTER_KEY, sealed)
        if (
            known is not None
            and self._is_current(known)
            and still_has_traits(self.store, known.traits, existing=existing)
        ):
            return known.traits
        race_s = FOLDER_RACE_S if self.store.url.startswith("file:") else RACE_S
        return probe(self.store, allow_single_writer=single, race_s=race_s)

    def _is_current(self, known: ProbeResult) -> bool:
        store = (self.store.url, self._settings.allow_single_writer_store)
        is_fresh = 0 <= self._clock() - known.probed_ms < PROBE_KEPT_MS
        return is_fresh and (known.store, known.place) == (store, self.store.identity)

    def _save_probe(self, traits: StoreTraits) -> None:
        store = (self.store.url, self._settings.allow_single_writer_store)
        found = ProbeResult(
            store=store, place=self.store.identity, traits=traits, probed_ms=self._clock()
        )
        PROBE.write_document(self._folder.path, found, write=self._folder.write)

    def _foreign_cluster(self, found: Cluster) -> str:
        folder = f"data folder {self._folder.path}"
        whose = "is new" if self._folder.is_new else f"to {self._folder.cluster_id}"
        is_s3 = self.store.url.startswith("s3:")
        same_options = ", with the same --s3-endpoint and --s3-region" if is_s3 else ""
        return (
            f"{self.store.url} belongs to cluster {found.cluster_id}, and {folder} {whose}: "
            "to continue with the store's cluster, run "
            f"`tierlog storage restore --store {self.store.url} --data-dir NEW`{same_options}; "
            "for this folder, give another prefix"
        )

    def _mark_refused(self, error: ConfigurationError) -> None:
        reason, before = str(error), self._refused
        if before is None or before.reason != reason:
            log.error("store refused: nothing is offloaded", error=reason)
        times = before.times + 1 if before is not None else 1
        pause_s = backoff_s(times, first_s=RETRY_S, max_s=REFUSED_MAX_S)
        self._refused = _Refusal(reason, times, time.monotonic() + pause_s)
        self._note_clock_refusal(error)

    def mark_unavailable(self, error: Exception) -> None:
        with self._marking:
            if self.unavailable is None:
                log.warning("store unavailable", store=self.store.url, error=str(error))
            self.unavailable = str(error) or "the store does not respond"
            self._note_clock_refusal(error)

    def _note_clock_refusal(self, error: Exception) -> None:
        """Any other error says nothing about the clock."""
        if isinstance(error, ClockSkewTooLarge):
            self._clock_refusal = str(error)

    def _mark_available(self) -> None:
        with self._marking:
            if self.unavailable is not None:
                log.info("store available again", store=self.store.url)
            self.unavailable = self._clock_refusal = None

    def _ping_if_due(self) -> None:
        """So that readiness and metrics say whether the store responds."""
        is_well = self.is_reachable and self.store.ledger.failures == self._failures_seen
        pause_s = POLL_S if is_well else RETRY_S
        if time.monotonic() - self._polled_s >= pause_s:
            self._ping()

    def _ping(self) -> None:
        """A GET, because the response to a refused HEAD does not say why."""
        try:
            with suppress(CorruptObject):  # it responds; the next start reports the object
                self.store.get(CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)
            self._mark_available()
        except MissingObject:
            self.mark_unavailable(StoreUnavailable(f"{self.store.url} no longer has {CLUSTER_KEY}"))
        except (StoreUnavailable, ConfigurationError) as error:
            self.mark_unavailable(error)
        self._polled_s = time.monotonic()
        self._failures_seen = self.store.ledger.failures


def check_access(store: ObjectStore, *, timeout_s: float) -> None:
    """Raise ConfigurationError if the store refuses the key or the clock. Called before a data
    folder is created, so that none is left behind. A store that does not respond passes.
    """
    try:
        read = partial(store.get, CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)
        run_in_daemon_thread(read, name="store-check").result(timeout_s)
    except ConfigurationError:
        raise
    except (TierlogError, TimeoutError):
        return


def check_has_no_bucket(data_dir: Path) -> None:
    """Raise ConfigurationError if the folder has a bucket. Called before it is opened without a
    store, which would report everything that is only in the bucket as lost.
    """
    try:
        if not has_bucket(data_dir):
            return
        known = PROBE.read_document(data_dir)
    except OSError as error:
        raise unusable(data_dir, error) from error
    which = f"the bucket {known.store[0]}" if known else "a bucket"
    raise ConfigurationError(f"data folder {data_dir} has {which}: name it with --store URL")
