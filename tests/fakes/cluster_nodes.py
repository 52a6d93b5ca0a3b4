"""Brokers' places in a cluster without the brokers: real folders, one bucket, one time that tests
move.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fakes.clock import Clock
from tests.fakes.faulty_object_store import FaultyObjectStore
from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.membership.members import Member, Members
from tierlog.broker.membership.own_node import Timing
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.registrations import Registration, Registrations
from tierlog.object_store.open import open_store

BEAT_MS, SESSION_MS = 2_000, 6_000


class Killed(BaseException):
    """The process ends here."""


class Node:
    """Of one start; `kill` and `stop` end it."""

    def __init__(self, world: World, path: Path, **settings: object) -> None:
        self.world, self.path = world, path
        self.store = FaultyObjectStore(open_store(world.bucket))
        self.store.before_call = world.before_call
        if world.is_down:
            self.store.go_down()
        given = {"heartbeat_interval_ms": BEAT_MS, "session_timeout_ms": SESSION_MS, **settings}
        self.settings = BrokerSettings(
            data_dir=path,
            cluster_join=True,
            advertised_url=f"http://{path.name}:8640",
            **given,  # type: ignore[arg-type]
        )
        self.folder = DataFolder(path)
        try:
            status = StoreStatus(self.folder, self.store, self.settings, clock=world.clock)
            status.verify_at_start(timeout_s=20)
            timing = Timing(world.clock, monotonic=lambda: world.now_ms, pause=world.pause)
            self.members = Members(self.folder, status, self.settings, timing)
            self.members.join()
        except BaseException:
            self.folder.close()
            raise
        world.running.append(self)

    @property
    def me(self) -> Member:
        return self.members.me

    def sees(self, other: Node) -> Member | None:
        return self.members.member(other.me.node_id)

    def is_seen_by(self, other: Node) -> bool:
        seen = other.sees(self)
        return seen is not None and seen.is_alive

    def round(self) -> None:
        """What the background does each heartbeat interval."""
        self.members.beat()
        self.members.look_around()

    def kill(self) -> None:
        self.world.running.remove(self)
        self.folder.close()

    def stop(self) -> None:
        self.members.leave(timeout_s=20)
        self.kill()


class World:
    """A bucket, and the nodes that run. `is_down`: the store, for nodes that start."""

    def __init__(self, root: Path) -> None:
        self.root, self.bucket = root, (root / "bucket").as_uri()
        self.clock, self.now_ms = Clock(), 1_000_000
        self.running: list[Node] = []
        self.is_down = False
        self.before_call: Callable[[str, str], None] = lambda call, key: None
        self.registrations = Registrations(open_store(self.bucket), pause=lambda s: None)

    def start(self, name: str, **settings: object) -> Node:
        return Node(self, self.root / name, **settings)

    def newest(self, node_id: int) -> Registration:
        found = self.registrations.load_registration(node_id).registration
        assert found is not None
        return found

    def pause(self, seconds: float) -> None:
        """Time passes; the nodes that run beat meanwhile."""
        before_ms = self.now_ms
        self.now_ms += max(1, round(seconds * 1000))
        if before_ms // BEAT_MS != self.now_ms // BEAT_MS:
            for node in self.running:
                node.members.beat()

    def run_for(self, duration_ms: int, *nodes: Node) -> None:
        """All that run, or these, do their rounds."""
        for _ in range(duration_ms // BEAT_MS):
            self.now_ms += BEAT_MS
            for node in nodes or self.running:
                node.round()

    def close(self) -> None:
        for node in list(self.running):
            node.kill()
