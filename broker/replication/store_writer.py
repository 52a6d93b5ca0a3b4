"""What the partitions that are led here write for STORE: one chain of write-ahead objects, each
with what all of them got since the one before (docs/cluster.md, "The bucket as a member").

* One object in `store.flush.ms`, or more while objects are full; none while there is nothing new.
* A part has what this disk has flushed, of one segment.
* A fence hits all of them. There is another chain from then on, and whose feed is over opens
  another one, if it still leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

import structlog

from tierlog.broker.replication.write_ahead_chain import ChainWriter, chain_folder
from tierlog.cold_tier.write_ahead_object import Part, Place
from tierlog.host.clock import monotonic_ms
from tierlog.host.threads import run_in_daemon_thread
from tierlog.hot_tier.log import PartitionLog
from tierlog.manifest.store import random_name
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import FencedError, OffsetTrimmed, ShuttingDown, TierlogError

log = structlog.get_logger(__name__)

PART_MAX: Final = 1 << 20  # of a partition, while others wait


class Said(NamedTuple):
    """What was so when an object was sent: as `Progress` has it, and the manifest's log start."""

    answered: int = 0
    log_start_offset: int = 0


class Feed:
    """A partition's part in a chain, under one epoch. `sent`, `stored`: up to where its records are
    in objects that were sent, and that are in the bucket; `said`: with the last that is there.
    """

    def __init__(
        self,
        log: PartitionLog,
        place: Place,
        epoch: int,
        *,
        chain: str,
        start_offset: int,
        wake: Callable[[Feed], None],
        monotonic: Callable[[], int],
    ) -> None:
        self.log, self.place, self.epoch, self.chain = log, place, epoch, chain
        self.sent = self.stored = start_offset
        self.said = Said()
        self.is_over = False
        self.is_asked = False  # whether an object is wanted even if there are no records
        self.say: Callable[[], Said] = Said
        self.on_stored: Callable[[], None] = lambda: None
        self._wake, self._monotonic = wake, monotonic
        self.progressed_ms = monotonic()

    def note_flushed(self, _: int = 0) -> None:
        if self.stored == self.sent:  # nothing was waited for
            self.progressed_ms = self._monotonic()
        self._wake(self)

    def ask(self) -> None:
        """Have an object sent, whether there are records or not."""
        self.is_asked = True
        self._wake(self)

    def behind_ms(self) -> int:
        """For how long the bucket has not got further, while it is behind."""
        return 0 if self.stored >= self.log.flushed_end else self._monotonic() - self.progressed_ms


class _Sent(NamedTuple):
    feed: Feed
    end_offset: int
    said: Said


def _start_thread(run: Callable[[], None]) -> None:
    run_in_daemon_thread(run, name="store-flush")


class StoreWriter:
    """Thread-safe. It has no thread before there is a feed; `start` starts it."""

    def __init__(
        self,
        store: ObjectStore,
        folder_id: str,
        *,
        flush_ms: int,
        object_max_bytes: int,
        open_chain: Callable[[ObjectStore, str], ChainWriter] = ChainWriter,
        start: Callable[[Callable[[], None]], None] = _start_thread,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._open_chain, self._start, self._monotonic = open_chain, start, monotonic
        self._store, self._folder_id = store, folder_id
        self._flush_s, self._object_max_bytes = flush_ms / 1000, object_max_bytes
        self._news = threading.Condition()
        self._feeds: set[Feed] = set()
        self._due: dict[Feed, None] = {}  # in the order in which they became so
        self.chain = ""
        self._writer: ChainWriter | None = None
        self._is_closed = False
        self._closing = threading.Event()
        self.written_objects = self.written_bytes = 0

    # --- feeds ------------------------------------------------------------------------------------

    def open_feed(
        self, partition_log: PartitionLog, place: Place, epoch: int, *, start_offset: int
    ) -> Feed:
        """Have its records written from `start_offset` on, under this epoch. Raises
        ShuttingDown.
        """
        with self._news:
            if self._is_closed:
                raise ShuttingDown("the broker stops")
            if self._writer is None:
                self._begin_chain()
                self._start(self._run)
            feed = Feed(
                partition_log,
                place,
                epoch,
                chain=self.chain,
                start_offset=start_offset,
                wake=self._wake,
                monotonic=self._monotonic,
            )
            self._feeds.add(feed)
        partition_log.writer.on_flushed.append(feed.note_flushed)
        feed.note_flushed()
        return feed

    def close_feed(self, feed: Feed) -> None:
        with self._news:
            feed.is_over = True
            self._due.pop(feed, None)
            if feed not in self._feeds:
                return
            self._feeds.discard(feed)
        feed.log.writer.on_flushed.remove(feed.note_flushed)

    def wait_until_stored(self, feed: Feed, end_offset: int, *, patience_s: float) -> bool:
        """False if the feed is over, or the bucket gets no further for so long."""
        with self._news:
            while feed.stored < end_offset and not feed.is_over:
                before = feed.stored
                if not self._news.wait_for(
                    lambda: feed.stored > before or feed.is_over,  # noqa: B023
                    patience_s,
                ):
                    return False
            return not feed.is_over

    def _wake(self, feed: Feed) -> None:
        with self._news:
            if not feed.is_over:
                self._due[feed] = None
                self._news.notify_all()

    # --- writing ----------------------------------------------------------------------------------

    def _begin_chain(self) -> None:
        self.chain = f"{self._folder_id}/{random_name()}"
        self._writer = self._open_chain(self._store, chain_folder(self.chain))

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or self._may_write())
                if self._is_closed:
                    return
            began_s = time.monotonic()
            if not self._write_next():
                self._closing.wait(max(0.0, began_s + self._flush_s - time.monotonic()))

    def _may_write(self) -> bool:
        assert self._writer is not None
        return bool(self._due) and self._writer.has_room

    def _write_next(self) -> bool:
        """Whether there is more to write at once."""
        parts, sent, left = list[Part](), list[_Sent](), self._object_max_bytes
        with self._news:
            writer, due = self._writer, list(self._due)
            assert writer is not None
        for feed in due:
            if left <= 0:
                break
            with self._news:
                self._due.pop(feed, None)
            try:
                part = self._read(feed, max_bytes=min(left, max(PART_MAX, left // len(due))))
            except (TierlogError, OSError) as error:
                log.error("not written for the bucket", partition=str(feed.log), error=str(error))
                continue
            if part is not None:
                left -= len(part.data)
                parts.append(part)
                sent.append(_Sent(feed, part.end_offset, feed.say()))
        if parts:
            future = writer.send(parts)
            self.written_objects += 1
            self.written_bytes += self._object_max_bytes - left
            future.add_done_callback(partial(self._note_written, writer, sent))
        return left <= 0

    def _read(self, feed: Feed, *, max_bytes: int) -> Part | None:
        """What comes next of a partition; None if nothing is new, or it is written no more."""
        is_asked, feed.is_asked = feed.is_asked, False
        end_offset, base_offset = feed.log.flushed_end, feed.sent
        if base_offset >= end_offset:
            empty = Part(feed.place, feed.epoch, base_offset, base_offset, base_offset, b"")
            return empty if is_asked and not feed.is_over else None
        try:
            read = feed.log.read_for_replica(
                base_offset, max_bytes=max_bytes, end_offset=end_offset
            )
        except OffsetTrimmed:  # what is deleted here is in the manifest, or trimmed
            first = feed.log.first_local_offset
            part = Part(feed.place, feed.epoch, base_offset, first, first, b"")
        else:
            try:
                data = b"".join(piece.read() for piece in read.slices)
            finally:
                read.close()
            extent = base_offset, read.end_offset, read.segment_base_offset
            part = Part(feed.place, feed.epoch, *extent, data)
        with self._news:
            if feed.is_over:
                return None
            feed.sent = part.end_offset
        if feed.sent < feed.log.flushed_end:
            self._wake(feed)
        return part

    def _note_written(self, writer: ChainWriter, sent: list[_Sent], written: Future[None]) -> None:
        error = written.exception()
        if isinstance(error, FencedError):
            self._note_fenced(writer)
            return
        if error is not None:
            return  # the broker stops
        now_ms = self._monotonic()
        with self._news:
            for feed, end_offset, said in sent:
                feed.stored = max(feed.stored, end_offset)
                feed.said, feed.progressed_ms = said, now_ms
            self._news.notify_all()
        for one in sent:
            if not one.feed.is_over:
                one.feed.on_stored()

    def _note_fenced(self, writer: ChainWriter) -> None:
        """Somebody claims for the bucket what is, or was, led here: all feeds are over."""
        with self._news:
            if writer is not self._writer or self._is_closed:
                return
            log.warning("the write-ahead chain is fenced: another begins", chain=self.chain)
            self._begin_chain()
            over, self._feeds = self._feeds, set()
            self._due.clear()
            for feed in over:
                feed.is_over = True
            self._news.notify_all()
        for feed in over:
            feed.log.writer.on_flushed.remove(feed.note_flushed)
        writer.close(wait=False)

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._closing.set()
            self._news.notify_all()
            writer = self._writer
        if writer is not None:
            writer.close(wait=False)
