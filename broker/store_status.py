"""How the store stands: whether it is this cluster's, keeps its promises, and answers.

* Nothing is written below the prefix before it is known to be this cluster's. A store that was down
  at the start is asked again in the background (`is_usable`). One that is then refused (another
  cluster's prefix, no access) is left alone, and `/readyz` says so, until a whole check, repeated
  with back-off, passes.
* It is found to be ours once; from then on only whether it answers is observed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from broker.bucket_state import has_bucket
from broker.data_folder import DataFolder
from broker.settings import BrokerSettings
from cold_tier.object_store import ObjectStore
from cold_tier.probe import RACE_S, StoreTraits, probe, still_has_traits
from manifest.keys import CLUSTER_KEY
from manifest.topic_objects import MAX_TOPIC_BYTES, Cluster, create_cluster, load_cluster
from record_format import sealed_json
from record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    CorruptManifest,
    CorruptObject,
    MissingObject,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

KIND: Final = "store-probe"
FOLDER_RACE_S: Final = 0.2
PROBE_KEPT_MS: Final = 7 * 86_400_000
LOOK_EVERY_S: Final = 15.0  # at a store that answered
LOOK_AGAIN_S: Final = 2.0  # at one that did not, or failed a request since
REFUSED_MAX_S: Final = 60.0  # a check may race eight writers: a wrong store is asked less and less


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found. `store`: its URL, and whether one writer was promised; `place` names
    the server too.
    """

    store: tuple[str, bool]
    place: str = ""
    traits: StoreTraits
    probed_ms: int


class StoreStatus:
    """Thread-safe; one whole check at a time. `on_checked`: told of the store's traits, before it
    counts as ours.
    """

    def __init__(
        self,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        on_checked: Callable[[StoreTraits], None],
    ) -> None:
        self._folder, self.store, self._settings = folder, store, settings
        self._clock, self._on_checked = clock, on_checked
        self._checking, self._noting = threading.Lock(), threading.Lock()
        self._failed: StoreUnavailable | None = None
        self.is_verified = False
        self.refusal: str | None = None
        self.unavailable: str | None = None
        self._refuses_clock = False
        self._looked_s = float("-inf")
        self._failures_seen = 0
        self._refusals = 0
        self._check_again_s = float("-inf")

    @property
    def answers(self) -> bool:
        """As far as is known; asks nobody."""
        return self.unavailable is None

    def recheck(self) -> bool:
        """Asks, unless it is known to be away: for who was refused, and may not be alone."""
        if self.answers:
            self._ask()
        return self.answers

    def check_first(self, *, timeout_s: float) -> None:
        """At startup: it may be down, but not wrong. Raises ConfigurationError for a store that
        cannot be trusted and for another cluster's prefix.
        """
        try:
            _in_thread_of_its_own(self.check).result(timeout_s)
        except TimeoutError:
            self.note_unavailable(StoreUnavailable(f"its check takes longer than {timeout_s:g} s"))
        except StoreUnavailable as error:
            self.note_unavailable(error)

    def is_usable(self) -> bool:
        """Asked again and again: whether it is ours to write to. Raises StoreUnavailable."""
        if self.refusal is not None and time.monotonic() < self._check_again_s:
            return False
        try:
            self.check()
        except ConfigurationError as error:
            self._note_refusal(error)
            return False
        except StoreUnavailable as error:
            self.note_unavailable(error)
            raise
        self._look()
        return True

    def check(self) -> None:
        """Whether the store keeps its promises and the prefix is ours; remembered once it is.

        Whoever waited for a check that failed gets its error: a store may take a minute not to
        answer.
        """
        failed = self._failed
        with self._checking:
            if self.is_verified:
                return
            if self._failed is not None and self._failed is not failed:
                raise StoreUnavailable(str(self._failed)) from self._failed
            try:
                self._check()
            except StoreUnavailable as error:
                self._failed = error
                raise

    def _check(self) -> None:
        found = self._cluster()
        if found is not None and found.cluster_id != self._folder.cluster_id:
            raise ConfigurationError(self._foreign(found))
        known = read_probe(self._folder.path)
        if found is None and known is not None and known.store[0] == self.store.url:
            raise StoreUnavailable(
                f"{self.store.url} has no {CLUSTER_KEY}, though this data folder used it: is "
                "it the right bucket, and is it mounted?"
            )
        traits = self._probe(known)
        if found is None:
            cluster = Cluster(cluster_id=self._folder.cluster_id, created_ms=self._clock())
            create_cluster(self.store, cluster)
        if known is None or known.traits is not traits:
            # Last: from here on a store without the object is no new one.
            self._remember(traits)
        self._on_checked(traits)
        if self.refusal is not None:
            log.info("store accepted", store=self.store.url)
        self.is_verified, self.refusal = True, None
        self._note_answer()

    def _cluster(self) -> Cluster | None:
        try:
            return load_cluster(self.store)
        except CorruptManifest as error:
            raise ConfigurationError(
                f"store {self.store.url}: {error}; does another kind of server answer there?"
            ) from error

    def check_clock(self) -> None:
        """Asks a store that is not known to be away. Raises ClockSkewTooLarge if it refuses this
        machine's clock.
        """
        self.recheck()
        if self._refuses_clock:
            raise ClockSkewTooLarge(self.refusal or self.unavailable or "")

    def require_store(self) -> ObjectStore:
        """The store, once it is known to be this cluster's. Raises StoreUnavailable,
        ConfigurationError.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self.check()
        return self.store

    def _probe(self, known: ProbeResult | None) -> StoreTraits:
        """The store's traits; asked anew when the store is another, the answer is a week old, or a
        short look finds that it holds no more.
        """
        single = self._settings.allow_single_writer_store
        if known is not None and self._is_of_this_store(known):
            existing = (CLUSTER_KEY, self.store.get(CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES))
            if still_has_traits(self.store, known.traits, existing=existing):
                return known.traits
        # A folder's create is link(2), in our own code: a short race looks for an odd file system.
        race_s = FOLDER_RACE_S if self.store.url.startswith("file:") else RACE_S
        return probe(self.store, allow_single_writer=single, race_s=race_s)

    def _is_of_this_store(self, known: ProbeResult) -> bool:
        store = (self.store.url, self._settings.allow_single_writer_store)
        is_fresh = 0 <= self._clock() - known.probed_ms < PROBE_KEPT_MS
        return is_fresh and (known.store, known.place) == (store, self.store.identity)

    def _remember(self, traits: StoreTraits) -> None:
        store = (self.store.url, self._settings.allow_single_writer_store)
        found = ProbeResult(
            store=store, place=self.store.identity, traits=traits, probed_ms=self._clock()
        )
        write_probe(self._folder, found)

    def _foreign(self, found: Cluster) -> str:
        folder = f"data folder {self._folder.path}"
        whose = "is new" if self._folder.is_new else f"to {self._folder.cluster_id}"
        alike = (
            ", --s3-endpoint and --s3-region as here" if self.store.url.startswith("s3:") else ""
        )
        return (
            f"{self.store.url} belongs to cluster {found.cluster_id}, and {folder} {whose}: "
            "to go on with the store's cluster, "
            f"tierlog storage restore --store {self.store.url} --data-dir NEW{alike}; "
            "for this folder, give another prefix"
        )

    def _note_refusal(self, error: ConfigurationError) -> None:
        if self.refusal != str(error):
            log.error("store refused: nothing is offloaded", error=str(error))
        self.refusal, self._refuses_clock = str(error), isinstance(error, ClockSkewTooLarge)
        pause_s = min(REFUSED_MAX_S, LOOK_AGAIN_S * 2.0 ** min(self._refusals, 10))
        self._refusals += 1
        self._check_again_s = time.monotonic() + pause_s

    def note_unavailable(self, error: Exception) -> None:
        with self._noting:
            if self.unavailable is None:
                log.warning("store unavailable", store=self.store.url, error=str(error))
            self.unavailable = str(error) or "the store does not answer"
            self._refuses_clock = isinstance(error, ClockSkewTooLarge)

    def _note_answer(self) -> None:
        with self._noting:
            if self.unavailable is not None:
                log.info("store answers again", store=self.store.url)
            self.unavailable, self._refuses_clock = None, False

    def _look(self) -> None:
        """Now and then, whether the store still answers: for what a broker says of itself."""
        is_well = self.answers and self.store.ledger.failures == self._failures_seen
        pause_s = LOOK_EVERY_S if is_well else LOOK_AGAIN_S
        if time.monotonic() - self._looked_s >= pause_s:
            self._ask()

    def _ask(self) -> None:
        """By a GET: what refuses a HEAD does not say why."""
        try:
            with suppress(CorruptObject):  # it answers; a start says what is wrong with that
                self.store.get(CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)
            self._note_answer()
        except MissingObject:
            self.note_unavailable(StoreUnavailable(f"{self.store.url} no longer has {CLUSTER_KEY}"))
        except (StoreUnavailable, ConfigurationError) as error:
            self.note_unavailable(error)
        self._looked_s = time.monotonic()
        self._failures_seen = self.store.ledger.failures


def refuse_early(store: ObjectStore, *, timeout_s: float) -> None:
    """Before a folder is begun: a refused key, or clock, is no reason to leave one behind. Raises
    ConfigurationError; a store that does not answer is asked again later.
    """
    try:
        _in_thread_of_its_own(lambda: store.get(CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)).result(
            timeout_s
        )
    except ConfigurationError:
        raise
    except (TierlogError, TimeoutError):
        return


def check_has_no_bucket(data_dir: Path) -> None:
    """Before a folder is opened without a store: what is only in its bucket would be told as lost.
    Raises ConfigurationError.
    """
    if has_bucket(data_dir):
        known = read_probe(data_dir)
        which = f"the bucket {known.store[0]}" if known else "a bucket"
        raise ConfigurationError(f"data folder {data_dir} has {which}: name it with --store URL")


def read_probe(data_dir: Path) -> ProbeResult | None:
    path = _probe_path(data_dir)
    if not path.exists():
        return None
    return sealed_json.decode(path.read_bytes(), kind=KIND, file=str(path), document=ProbeResult)


def write_probe(folder: DataFolder, found: ProbeResult) -> None:
    folder.write(_probe_path(folder.path), sealed_json.encode(found, kind=KIND))


def _probe_path(data_dir: Path) -> Path:
    return data_dir / "tierlog" / "store.json"


def _in_thread_of_its_own(call: Callable[[], object]) -> Future[None]:
    """One that no process waits for at its end: a store may take a minute to say nothing."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="store-check", daemon=True).start()
    return done
