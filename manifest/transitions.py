"""Every change of a manifest, as a pure function from one state to the next.

* New states are made only here. No I/O, clock or randomness: times are arguments, and pages come
  from a `PageSource` (a page is immutable, so reading one is pure as well).
* Invariants are checked before and after; a change that does not apply raises InvalidTransition.
* A transition can be reapplied to a newer state after a lost race. Applied to a state in which it
  has already taken effect (the response was lost), it returns that same object.
* Those that merge segments or repair damaged objects (`merge_segments`, `replace_objects`,
  `replace_with_readable`, `drop_lost_segment`) do not advance `compacted_before`, which would also
  excuse offsets that are missing elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tierlog.manifest.invariants import InvalidTransition, require, require_step, where
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import (
    EpochStart,
    Manifest,
    OffsetGap,
    PageRef,
    PageSource,
    Reason,
    RemovedObject,
    RemovedPage,
    RemovedPageKind,
    UnwrittenPage,
    append_epoch,
    find_entry,
    live_entries,
    prune_epochs,
)
from tierlog.record_format.errors import FencedError
from tierlog.record_format.segment_entry import SegmentEntry

TAKE_OVER = "`tierlog serve --take-over` makes this folder the owner again"


class Claim(NamedTuple):
    """A data folder's claim to own a partition.

    `epochs`: the folder's history since the manifest it last saw; the last one is claimed.
    `recorded`: the (owner, epoch) pairs that the folder recorded, because it claimed them or saw
    them in force. The claimed pair is added only when the claim is made, because an older copy of
    the same folder could claim it too. `elected`: the replica leads by its own chain
    (`replica_sets`), which decides instead of them: its epoch has to be above the one in force.
    """

    owner: str
    epochs: tuple[EpochStart, ...]
    recorded: frozenset[tuple[str, int]]
    take_over: bool = False
    elected: bool = False
    seen: Manifest | None = None  # the manifest in force that the folder recorded last

    @property
    def epoch(self) -> int:
        return self.epochs[-1].epoch


def create(keys: PartitionKeys, *, claim: Claim, log_start_offset: int) -> Manifest:
    """The state before the first version: owned by the claimant, with nothing in the cold tier."""
    history: tuple[EpochStart, ...] = ()
    for start in claim.epochs:
        history = append_epoch(history, start)
    manifest = Manifest(
        topic=keys.topic,
        topic_id=keys.topic_id,
        partition=keys.partition,
        version=0,
        nonce="",
        created_ms=-1,
        owner=claim.owner,
        leader_epoch=claim.epoch,
        epochs=history,
        log_start_offset=log_start_offset,
        end_offset=log_start_offset,
    )
    require(manifest)
    return manifest


def apply_claim(manifest: Manifest, claim: Claim) -> Manifest:
    """Make the claimant the owner, under a higher epoch.

    Raises FencedError if the folder never recorded the owner and epoch in force (unless it takes
    over), and if the claimed epoch is not higher than the one in force.
    """
    require(manifest)
    if not claim.take_over:
        check_may_claim(manifest, claim)
    if (manifest.owner, manifest.leader_epoch) == (claim.owner, claim.epoch):
        return manifest
    _check_above(manifest, claim)
    after = replace(
        manifest,
        owner=claim.owner,
        leader_epoch=claim.epoch,
        epochs=_history(manifest, claim),
        assigned_to=msgspec.UNSET,
    )
    return require_step(manifest, after)


def _history(manifest: Manifest, claim: Claim) -> tuple[EpochStart, ...]:
    """The epochs in force, and those of the claim above them. From where the log of an elected
    replica begins, its own alone: what the manifest has of others is of leaders whose records were
    never committed.
    """
    history = manifest.epochs
    if claim.elected:
        oldest = claim.epochs[0]
        below = tuple(one for one in history if one.epoch < oldest.epoch)
        history = append_epoch(below, _as_recorded(manifest, oldest))
    for start in claim.epochs:
        if start.epoch > history[-1].epoch:
            history = append_epoch(history, start)
    return history


def _as_recorded(manifest: Manifest, oldest: EpochStart) -> EpochStart:
    """The oldest epoch of a log may have begun below it, under another owner."""
    same = (one for one in manifest.epochs if one.epoch == oldest.epoch)
    known = next(same, oldest)
    return known if known.start_offset <= oldest.start_offset else oldest


def _check_above(manifest: Manifest, claim: Claim) -> None:
    if claim.epoch <= manifest.leader_epoch:
        raise FencedError(
            f"{where(manifest)}: claimed epoch {claim.epoch} is not above {manifest.leader_epoch}"
        )


def assign(manifest: Manifest, folder: str) -> Manifest:
    """Let only this folder claim the partition next. For the owner once it has stopped, with all
    records in the bucket; and for anybody while nobody has claimed what was assigned.
    """
    require(manifest)
    if manifest.assigned_to == folder:
        return manifest
    return require_step(manifest, replace(manifest, assigned_to=folder))


def check_may_claim(manifest: Manifest, claim: Claim) -> None:
    """Raises FencedError unless the partition is the claimant's, or it was elected to lead."""
    if not claim.elected:
        check_recorded(manifest, claim.recorded, claimant=claim.owner)
    elif (manifest.owner, manifest.leader_epoch) != (claim.owner, claim.epoch):
        _check_above(manifest, claim)


def check_recorded(
    manifest: Manifest, recorded: frozenset[tuple[str, int]], *, claimant: str
) -> None:
    """Raises FencedError if the partition is assigned to another folder than the claimant's, or, if
    to none, if the owner and epoch in force are not among `recorded`.
    """
    if manifest.assigned_to == claimant:
        return
    if manifest.assigned_to:
        raise FencedError(f"{where(manifest)}: it is assigned to folder {manifest.assigned_to}")
    if (manifest.owner, manifest.leader_epoch) not in recorded:
        raise FencedError(
            f"{where(manifest)}: epoch {manifest.leader_epoch} of owner {manifest.owner} "
            f"is in force, and this data folder never recorded it; {TAKE_OVER}"
        )


def add_segments(manifest: Manifest, entries: Sequence[SegmentEntry]) -> Manifest:
    """Append uploaded segments, in offset order.

    A segment is skipped if it is already there with the same bytes (under any key), or is below the
    log start because of a concurrent trim. Its objects are then orphans, which are deleted by age.
    """
    require(manifest)
    fresh = [entry for entry in entries if not _already_applied(manifest, entry)]
    if not fresh:
        return manifest
    first = fresh[0]
    if first.last_offset < manifest.end_offset:
        raise InvalidTransition(
            f"{where(manifest)}: segment {first.base_offset} ends below the cold tier's end "
            f"{manifest.end_offset}"
        )
    after = replace(
        manifest,
        segments=(*manifest.segments, *fresh),
        end_offset=fresh[-1].next_offset,
    )
    return require_step(manifest, after)


def _already_applied(manifest: Manifest, entry: SegmentEntry) -> bool:
    """Whether `entry` is already in the manifest, or wholly below the log start."""
    if entry.last_offset < manifest.log_start_offset:
        return True
    there = manifest.find_run(entry.base_offset)
    # An entry old enough to be in a page is not uploaded again: a segment that falls into one is
    # refused.
    return isinstance(there, SegmentEntry) and there.same_bytes(entry)


def trim(manifest: Manifest, before_offset: int, *, pages: PageSource, now_ms: int) -> Manifest:
    """Advance the log start to `before_offset` (Kafka's DeleteRecords); never lowers it.

    It may be past the end of the cold tier: then the next segment may begin below it.
    """
    return _advance(manifest, before_offset, pages=pages, now_ms=now_ms, reason=Reason.TRIM)


def drop_expired(
    manifest: Manifest, before_offset: int, *, pages: PageSource, now_ms: int
) -> Manifest:
    """Retention: drop all segments below `before_offset`, which is a segment boundary."""
    return _advance(manifest, before_offset, pages=pages, now_ms=now_ms, reason=Reason.RETENTION)


def follow_log_start(
    manifest: Manifest, log_start_offset: int, *, trimmed_to: int, pages: PageSource, now_ms: int
) -> Manifest:
    """Advance the log start to that of the local log: up to `trimmed_to` as a trim, which overrides
    pins, and from there on as retention.
    """
    trimmed = trim(manifest, min(trimmed_to, log_start_offset), pages=pages, now_ms=now_ms)
    return drop_expired(trimmed, log_start_offset, pages=pages, now_ms=now_ms)


def _advance(
    manifest: Manifest, before_offset: int, *, pages: PageSource, now_ms: int, reason: Reason
) -> Manifest:
    require(manifest)
    if before_offset <= manifest.log_start_offset:
        return manifest
    removed: list[RemovedObject] = []
    kept_pages: list[PageRef | UnwrittenPage] = []
    removed_pages: list[RemovedPage] = []
    for page in manifest.pages:
        if page.base_offset >= before_offset:
            kept_pages.append(page)
        elif page.last_offset < before_offset and isinstance(page, PageRef):
            removed_pages.append(
                RemovedPage(page.key, now_ms, reason, RemovedPageKind.SEGMENTS, page.crc32c)
            )
        else:
            live = live_entries(page, pages)
            removed += _removals([e for e in live if e.last_offset < before_offset], now_ms, reason)
            rest = tuple(e for e in live if e.last_offset >= before_offset)
            kept_pages += [_narrowed(page, rest)] if rest else []
    removed += _removals(
        [e for e in manifest.segments if e.last_offset < before_offset], now_ms, reason
    )
    after = replace(
        manifest,
        log_start_offset=before_offset,
        end_offset=max(manifest.end_offset, before_offset),
        epochs=prune_epochs(manifest.epochs, before_offset),
        gaps=tuple(gap for gap in manifest.gaps if gap.end_offset >= before_offset),
        pages=tuple(kept_pages),
        segments=tuple(e for e in manifest.segments if e.last_offset >= before_offset),
        removed=(*manifest.removed, *removed),
        removed_pages=(*manifest.removed_pages, *removed_pages),
    )
    return require_step(manifest, after)


def _narrowed(
    page: PageRef | UnwrittenPage, live: tuple[SegmentEntry, ...]
) -> PageRef | UnwrittenPage:
    if isinstance(page, UnwrittenPage):
        return UnwrittenPage(entries=live)
    return replace(
        page,
        base_offset=live[0].base_offset,
        entry_count=len(live),
        size_bytes=sum(entry.size_bytes for entry in live),
    )


def _removals(entries: Sequence[SegmentEntry], now_ms: int, reason: Reason) -> list[RemovedObject]:
    return [RemovedObject(key, now_ms, reason) for entry in entries for key in entry.keys]


def replace_segments(
    manifest: Manifest,
    old: Sequence[SegmentEntry],
    new: Sequence[SegmentEntry],
    *,
    pages: PageSource,
    now_ms: int,
) -> Manifest:
    """Compaction: replace the consecutive entries `old` by `new`, within the same offsets.

    Raises InvalidTransition if the entries have changed, except that a concurrent trim may have
    removed some from the front.
    """
    after = replace_run(manifest, old, new, pages=pages, now_ms=now_ms)
    if after is manifest:
        return manifest
    end = max(manifest.compacted_before, old[-1].next_offset)
    return require_step(manifest, replace(after, compacted_before=end))


def replace_run(
    manifest: Manifest,
    old: Sequence[SegmentEntry],
    new: Sequence[SegmentEntry],
    *,
    pages: PageSource,
    now_ms: int,
) -> Manifest:
    """Replace the consecutive entries `old` by `new`, and list the objects of `old` as removed.

    The caller accounts for missing offsets, and checks the step. Raises InvalidTransition like
    `replace_segments`; returns the same object if it is already done.
    """
    require(manifest)
    assert old, "a replacement replaces something"
    start, end = old[0].base_offset, old[-1].next_offset
    new = [entry for entry in new if entry.last_offset >= manifest.log_start_offset]
    touched = [p for p in manifest.pages if p.last_offset >= start and p.base_offset < end]
    in_pages = [entry for page in touched for entry in live_entries(page, pages)]
    in_range = [e for e in (*in_pages, *manifest.segments) if start <= e.base_offset < end]
    if new and in_range == new:
        return manifest
    expected = [e.log_key for e in old if e.last_offset >= manifest.log_start_offset]
    if [e.log_key for e in in_range] != expected:
        raise InvalidTransition(f"{where(manifest)}: the entries in [{start}, {end}) have changed")
    # With nothing before the run, `new` may begin below `start`: a trim removed entries from which
    # its first segment was compacted.
    is_first = all(run.base_offset >= start for run in (*manifest.pages, *manifest.segments))
    if new and not ((start <= new[0].base_offset or is_first) and new[-1].next_offset <= end):
        raise InvalidTransition(
            f"{where(manifest)}: the replacement is not within [{start}, {end})"
        )
    after = _with_run(manifest, touched, in_pages, start=start, end=end, new=new)
    removed = [
        *(RemovedObject(p.key, now_ms, Reason.REPLACED) for p in touched if isinstance(p, PageRef)),
        *_removals(in_range, now_ms, Reason.REPLACED),
    ]
    return replace(after, removed=(*manifest.removed, *removed))


def _with_run(
    manifest: Manifest,
    touched: Sequence[PageRef | UnwrittenPage],
    in_pages: Sequence[SegmentEntry],
    *,
    start: int,
    end: int,
    new: Sequence[SegmentEntry],
) -> Manifest:
    """Put `new` in place of [start, end): in an unwritten page if it touches pages, else inline."""
    inline_before = [e for e in manifest.segments if e.base_offset < start]
    inline_after = [e for e in manifest.segments if e.base_offset >= end]
    if not touched:
        return replace(manifest, segments=(*inline_before, *new, *inline_after))
    entries = (
        *(e for e in in_pages if e.base_offset < start),
        *new,
        *(e for e in in_pages if e.base_offset >= end),
    )
    first = manifest.pages.index(touched[0])
    unwritten = (UnwrittenPage(entries=entries),) if entries else ()
    around = (*manifest.pages[:first], *unwritten, *manifest.pages[first + len(touched) :])
    return replace(manifest, pages=around, segments=tuple(inline_after))


def merge_segments(
    manifest: Manifest,
    run: Sequence[SegmentEntry],
    merged: SegmentEntry,
    *,
    pages: PageSource,
    now_ms: int,
) -> Manifest:
    """Replace the entries `run`, each of which begins where the one before ends, by `merged`, which
    has the bytes of all of them. No change if some were trimmed or have expired.

    Raises InvalidTransition if it has other offsets, sizes or counts, or if the entries have
    changed.
    """
    require(manifest)
    if run[0].last_offset < manifest.log_start_offset:
        return manifest
    if any(left.next_offset != right.base_offset for left, right in pairwise(run)):
        raise InvalidTransition(f"{where(manifest)}: segments to merge do not join")
    whole = (run[0].base_offset, run[-1].last_offset, *_sums(run))
    found = (merged.base_offset, merged.last_offset, *_sums([merged]))
    if found != whole:
        raise InvalidTransition(f"{where(manifest)}: {whole} are merged to {found}")
    after = replace_run(manifest, run, [merged], pages=pages, now_ms=now_ms)
    return after if after is manifest else require_step(manifest, after)


def _sums(entries: Sequence[SegmentEntry]) -> tuple[int, int]:
    """Of bytes and of records."""
    return sum(one.size_bytes for one in entries), sum(one.record_count for one in entries)


def merge_pages(
    manifest: Manifest, run: Sequence[PageRef], merged: PageRef, *, now_ms: int
) -> Manifest:
    """Replace the pages `run` by `merged`, which has the same live entries.

    Nothing changes if the pages are no longer the same, because retention has advanced.
    """
    require(manifest)
    assert sum(page.entry_count for page in run) == merged.entry_count, "merging keeps every entry"
    first = next((n for n, page in enumerate(manifest.pages) if page == run[0]), 0)
    end = first + len(run)
    if manifest.pages[first:end] != tuple(run):
        return manifest
    removed = [RemovedObject(page.key, now_ms, Reason.REPLACED) for page in run]
    after = replace(
        manifest,
        pages=(*manifest.pages[:first], merged, *manifest.pages[end:]),
        removed=(*manifest.removed, *removed),
    )
    return require_step(manifest, after)


def record_gap(manifest: Manifest, *, end_offset: int) -> Manifest:
    """Record that no offset from the end of the cold tier to `end_offset` has a record."""
    require(manifest)
    if end_offset <= manifest.end_offset:
        raise InvalidTransition(
            f"{where(manifest)}: the gap's end {end_offset} is not above {manifest.end_offset}"
        )
    gaps = list(manifest.gaps)
    gap = OffsetGap(manifest.end_offset, end_offset)
    if gaps and gaps[-1].end_offset == gap.start_offset:
        gap = OffsetGap(gaps.pop().start_offset, end_offset)
    after = replace(manifest, gaps=(*gaps, gap), end_offset=end_offset)
    return require_step(manifest, after)


def forget_removed(manifest: Manifest, keys: Collection[str]) -> Manifest:
    """Delist removed objects and removed pages whose keys are about to be deleted."""
    require(manifest)
    removed = tuple(entry for entry in manifest.removed if entry.key not in keys)
    pages = tuple(page for page in manifest.removed_pages if page.key not in keys)
    if (len(removed), len(pages)) == (len(manifest.removed), len(manifest.removed_pages)):
        return manifest
    return require_step(manifest, replace(manifest, removed=removed, removed_pages=pages))


def replace_objects(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """Replace a segment's objects by others with the same log bytes; no change if it was trimmed.

    Raises InvalidTransition if the bytes differ, or if `old` is no longer in the manifest.
    """
    require(manifest)
    if not new.same_bytes(old):
        raise InvalidTransition(f"{where(manifest)}: segment {new.base_offset} has different bytes")
    return _replace_entry(manifest, old, new, pages=pages, now_ms=now_ms)


def replace_with_readable(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """`replace_objects`, but `new` has only the records of `old` that can still be read.

    Its batches must span the same offsets.
    """
    require(manifest)
    spans = (new.base_offset, new.last_offset)
    if spans != (old.base_offset, old.last_offset) or new.record_count > old.record_count:
        raise InvalidTransition(
            f"{where(manifest)}: segment {spans} does not match what is left of {old.base_offset}"
        )
    return _replace_entry(manifest, old, new, pages=pages, now_ms=now_ms)


def _replace_entry(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    if old.last_offset < manifest.log_start_offset:
        return manifest
    after = replace_run(manifest, [old], [new], pages=pages, now_ms=now_ms)
    return after if after is manifest else require_step(manifest, after)


def drop_lost_segment(
    manifest: Manifest, lost: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """Replace a segment that is lost in both tiers by a gap.

    Nothing changes if its log object is no longer in the manifest (dropped, replaced or trimmed).
    """
    require(manifest)
    there = find_entry(manifest, lost.base_offset, pages=pages)
    if there is None or there.log_key != lost.log_key:
        return manifest
    after = replace_run(manifest, [lost], [], pages=pages, now_ms=now_ms)
    gaps = _merged([*manifest.gaps, OffsetGap(lost.base_offset, lost.next_offset)])
    return require_step(manifest, replace(after, gaps=gaps))


def _merged(gaps: Sequence[OffsetGap]) -> tuple[OffsetGap, ...]:
    """In offset order, with adjacent gaps merged."""
    merged: list[OffsetGap] = []
    for gap in sorted(gaps, key=lambda one: one.start_offset):
        if merged and merged[-1].end_offset >= gap.start_offset:
            last = merged.pop()
            gap = OffsetGap(last.start_offset, max(last.end_offset, gap.end_offset))
        merged.append(gap)
    return tuple(merged)
