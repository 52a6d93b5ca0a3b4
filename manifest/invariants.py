"""Invariants of every manifest, and of every step from one manifest to the next.

* Pure: these functions describe the first violation in words. The caller decides which error that
  is: a decoded object is corrupt, a transition is refused.
* Missing offsets between entries are legal only if a recorded gap or compaction explains them.
* No object is lost: one that a step no longer references is listed as removed by that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Final

from tierlog.manifest.state import Manifest, PageRef, UnwrittenPage
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.segment_entry import SegmentEntry

# Both are counted further by each take-over: an i32 and an i64 in Kafka's formats.
MAX_EPOCH: Final = 2**30
MAX_END_OFFSET: Final = 2**62

Run = PageRef | UnwrittenPage | SegmentEntry


class InvalidTransition(TierlogError):
    """The change does not apply to this manifest: derive it again from the newest one."""


def violation(manifest: Manifest) -> str | None:
    """A description of the first violated invariant, or None."""
    checks = (_numbers(manifest), _epochs(manifest), _gaps(manifest), _entries(manifest))
    return next(chain.from_iterable(checks), None)


def step_violation(before: Manifest, after: Manifest) -> str | None:
    """The first violation by the step, or None. Both manifests have passed `violation`."""
    return next(chain(_monotonic(before, after), _dropped(before, after)), None)


def require(manifest: Manifest) -> None:
    """Raise InvalidTransition if an invariant is violated."""
    if (broken := violation(manifest)) is not None:
        raise InvalidTransition(f"{where(manifest)}: {broken}")


def require_step(before: Manifest, after: Manifest) -> Manifest:
    """Check `after` and the step to it, and return it. Raises InvalidTransition."""
    require(after)
    if (broken := step_violation(before, after)) is not None:
        raise InvalidTransition(f"{where(before)}: {broken}")
    return after


def where(manifest: Manifest) -> str:
    return f"{manifest.topic}-{manifest.partition}, manifest version {manifest.version}"


def uncovered(manifest: Manifest, start_offset: int, end_offset: int) -> tuple[int, int] | None:
    """The first part of [start_offset, end_offset) that neither a gap nor compaction explains."""
    position = max(start_offset, manifest.compacted_before)
    for gap in manifest.gaps:
        if gap.start_offset > position:
            end_offset = min(end_offset, gap.start_offset)
            break
        position = max(position, gap.end_offset)
    return (position, end_offset) if position < end_offset else None


def _numbers(manifest: Manifest) -> Iterator[str]:
    if manifest.partition < 0 or manifest.version < 0 or manifest.leader_epoch < 0:
        yield "partition, version or epoch is negative"
    if manifest.leader_epoch > MAX_EPOCH or manifest.end_offset > MAX_END_OFFSET:
        yield f"epoch {manifest.leader_epoch} or end {manifest.end_offset} leaves no room for more"
    if not manifest.owner:
        yield "no owner"
    if not 0 <= manifest.log_start_offset <= manifest.end_offset:
        yield f"log start {manifest.log_start_offset} is not in [0, {manifest.end_offset}]"


def _epochs(manifest: Manifest) -> Iterator[str]:
    if not manifest.epochs:
        yield "no epoch history"
        return
    for left, right in pairwise(manifest.epochs):
        if left.epoch >= right.epoch or left.start_offset >= right.start_offset:
            yield f"epoch {right.epoch} does not follow epoch {left.epoch}"
    last = manifest.epochs[-1]
    if (last.epoch, last.owner) != (manifest.leader_epoch, manifest.owner):
        yield f"the history ends with epoch {last.epoch}, not with {manifest.leader_epoch}"


def _gaps(manifest: Manifest) -> Iterator[str]:
    for gap in manifest.gaps:
        if not 0 <= gap.start_offset < gap.end_offset <= manifest.end_offset:
            yield f"gap [{gap.start_offset}, {gap.end_offset}) ends past {manifest.end_offset}"
    for left, right in pairwise(manifest.gaps):
        if left.end_offset >= right.start_offset:
            yield f"gaps at {left.start_offset} and {right.start_offset} are not in order"


def _entries(manifest: Manifest) -> Iterator[str]:
    position = manifest.log_start_offset
    previous_last = -1
    for run in chain(manifest.pages, manifest.segments):
        yield from _run(manifest, run)
        if run.base_offset <= previous_last:
            yield f"the entry at {run.base_offset} overlaps the one that ends at {previous_last}"
        if (hole := uncovered(manifest, position, run.base_offset)) is not None:
            yield f"offsets [{hole[0]}, {hole[1]}) are missing before {run.base_offset}"
        previous_last = run.last_offset
        position = max(position, run.next_offset)
    if position > manifest.end_offset:
        yield f"entries end at {position}, past the end {manifest.end_offset}"
    if (hole := uncovered(manifest, position, manifest.end_offset)) is not None:
        yield f"offsets [{hole[0]}, {hole[1]}) are missing at the end"


def _run(manifest: Manifest, run: Run) -> Iterator[str]:
    if not 0 <= run.base_offset <= run.last_offset:
        yield f"an entry spans [{run.base_offset}, {run.last_offset}]"
    if run.last_offset < manifest.log_start_offset:
        yield f"the entry at {run.base_offset} lies wholly below the log start"
    if isinstance(run, UnwrittenPage):
        yield from _unwritten_page(manifest, run)
    elif isinstance(run, PageRef):
        if run.entry_count <= 0 or run.size_bytes <= 0:
            yield f"the page at {run.base_offset} is empty"
    else:
        yield from entry_violation(manifest, run)


def _unwritten_page(manifest: Manifest, page: UnwrittenPage) -> Iterator[str]:
    for entry in page.entries:
        yield from entry_violation(manifest, entry)
    for left, right in pairwise(page.entries):
        if left.last_offset >= right.base_offset:
            yield f"the entry at {right.base_offset} overlaps the one before it"
        if (hole := uncovered(manifest, left.next_offset, right.base_offset)) is not None:
            yield f"offsets [{hole[0]}, {hole[1]}) are missing in a page"


def entry_violation(manifest: Manifest, entry: SegmentEntry) -> Iterator[str]:
    """Violations within a single entry."""
    if not 0 <= entry.base_offset <= entry.last_offset:
        yield f"an entry spans [{entry.base_offset}, {entry.last_offset}]"
    if entry.size_bytes <= 0 or entry.indexes_size_bytes <= 0 or entry.record_count < 0:
        yield f"the entry at {entry.base_offset} has an invalid size or record count"
    if entry.chunk_table_position < 0 or entry.chunk_table_size <= 0:
        yield f"the entry at {entry.base_offset} has no chunk table"
    if entry.chunk_table_position + entry.chunk_table_size > entry.indexes_size_bytes:
        yield f"the chunk table of the entry at {entry.base_offset} extends past its object"
    if not 0 <= entry.leader_epoch <= manifest.leader_epoch:
        yield (
            f"the entry at {entry.base_offset} has epoch {entry.leader_epoch}, "
            f"not in [0, {manifest.leader_epoch}]"
        )
    if not entry.log_key or not entry.indexes_key or entry.log_key == entry.indexes_key:
        yield f"the entry at {entry.base_offset} does not reference two objects"


def _monotonic(before: Manifest, after: Manifest) -> Iterator[str]:
    same = (before.topic, before.topic_id, before.partition)
    if same != (after.topic, after.topic_id, after.partition):
        yield "the step changes the partition"
    if after.leader_epoch < before.leader_epoch:
        yield f"the epoch decreases from {before.leader_epoch} to {after.leader_epoch}"
    if after.leader_epoch == before.leader_epoch and after.owner != before.owner:
        yield f"the owner changes within epoch {before.leader_epoch}"
    is_waiting = bool(before.assigned_to) and after.leader_epoch == before.leader_epoch
    if is_waiting and not (after.assigned_to and after.end_offset == before.end_offset):
        yield f"it is assigned to {before.assigned_to}: nobody else may write"
    for name in ("log_start_offset", "end_offset", "compacted_before"):
        if getattr(after, name) < getattr(before, name):
            yield f"{name} decreases from {getattr(before, name)} to {getattr(after, name)}"
    for gap in before.gaps:
        if gap.end_offset > after.log_start_offset and not any(
            kept.start_offset <= gap.start_offset and gap.end_offset <= kept.end_offset
            for kept in after.gaps
        ):
            yield f"the gap at {gap.start_offset} is dropped"


def _dropped(before: Manifest, after: Manifest) -> Iterator[str]:
    listed = {removed.key for removed in after.removed}
    listed.update(page.key for page in after.removed_pages)
    missing = direct_references(before) - direct_references(after) - listed
    if missing:
        yield f"{len(missing)} objects are neither referenced nor removed, such as {min(missing)}"


def direct_references(manifest: Manifest) -> set[str]:
    """Keys that the manifest itself references, not through its pages."""
    keys = {key for entry in manifest.segments for key in entry.keys}
    for page in manifest.pages:
        if isinstance(page, PageRef):
            keys.add(page.key)
        else:
            keys.update(key for entry in page.entries for key in entry.keys)
    return keys
