"""Decides what happens to the local log when its folder takes a partition over.

| the local log                                   | action                                         |
|-------------------------------------------------|------------------------------------------------|
| holds records past the point where the          | they move to `tierlog/diverged/`:              |
| histories diverge, or within a manifest gap     | never served, uploaded or deleted; reported    |
| ends below the manifest's end                   | restarts at the manifest's end                 |
| extends past the manifest's end                 | is split into segments there                   |

Another owner may have acknowledged records that it never uploaded. To keep their offsets from being
assigned again, the log continues `gap` offsets above all that it or this folder is known to have
reached, above a recorded gap that begins where the bucket ends:

| kept of the local log                           | action                                         |
|-------------------------------------------------|------------------------------------------------|
| nothing past the manifest's end                 | restarts above the gap                         |
| records past it that belong to both histories   | they are uploaded; one commit holds the claim, |
|                                                 | the records and the gap; then the log restarts |
|                                                 | above the gap                                  |

* Pure: `take_over` carries out the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierlog.manifest.state import EpochStart, Manifest, append_epoch, divergence_offset


class LocalLog(NamedTuple):
    """`history`: the epochs that this folder knows, its own and those that it saw in force.

    `recorded`: the (owner, epoch) pairs that it claimed or saw in force, including those under
    which nothing was written. `ranges`: [base, next) of its non-empty segments. `flushed_end`: the
    log is known to have reached it.
    """

    history: tuple[EpochStart, ...]
    recorded: frozenset[tuple[str, int]]
    ranges: tuple[tuple[int, int], ...]
    end_offset: int
    log_start_offset: int = 0
    flushed_end: int = 0


class TakeOverPlan(NamedTuple):
    """The steps, in order; None means the step is not needed.

    `diverged_from`: set the local log aside from there. `start_at`: restart the log empty, there.
    `split_at`: keep the log, with a segment boundary there. `resume_at`: upload what is kept past
    the manifest's end, then continue there.
    """

    diverged_from: int | None = None
    start_at: int | None = None
    split_at: int | None = None
    resume_at: int | None = None


def plan_take_over(local: LocalLog, manifest: Manifest | None, *, gap: int) -> TakeOverPlan:
    """The plan under this manifest; `gap` is the number of offsets to skip."""
    end = manifest.end_offset if manifest else 0
    kept_end = _same_until(local, manifest) if manifest else local.end_offset
    start = end
    if gap:
        kept_end = _held_until(local, end, kept_end) if manifest else 0
        start = max(_reached(manifest), kept_end, local.flushed_end) + gap
    has_tail = kept_end > end
    behind = not has_tail and kept_end < start
    holds_more = any(next_offset > kept_end for _, next_offset in local.ranges)
    straddled = any(base < end < next_offset for base, next_offset in local.ranges)
    return TakeOverPlan(
        diverged_from=kept_end if holds_more else None,
        start_at=start if behind else None,
        split_at=end if straddled and not behind else None,
        resume_at=start if gap and has_tail else None,
    )


def _reached(manifest: Manifest | None) -> int:
    """A lower bound of the other log's end: its last epoch began there."""
    return max(manifest.end_offset, manifest.epochs[-1].start_offset) if manifest else 0


def _held_until(local: LocalLog, end: int, same_until: int) -> int:
    """The offset up to which, even past the manifest's end, the local log has every record that
    both histories share.

    An earlier attempt may have emptied it, and a trim may have gone past the manifest's end.
    """
    start = held = max(end, local.log_start_offset)
    for base, next_offset in local.ranges:
        if base <= held:
            held = max(held, next_offset)
    held = min(held, same_until)
    return held if held > start else min(end, same_until)


def _same_until(local: LocalLog, manifest: Manifest) -> int:
    """The offset below which the local records are those of the manifest's history."""
    same_until = local.end_offset
    if (manifest.owner, manifest.leader_epoch) not in local.recorded:
        same_until = divergence_offset(
            local.history,
            manifest.epochs,
            local_end=local.end_offset,
            remote_end=_reached(manifest),
        )
    for gap in manifest.gaps:
        if any(
            base < gap.end_offset and gap.start_offset < next_offset
            for base, next_offset in local.ranges
        ):
            same_until = min(same_until, gap.start_offset)
    return same_until


def history_of(copy: Manifest | None, own: Sequence[EpochStart]) -> tuple[EpochStart, ...]:
    """The epochs of the last manifest seen in force, and those that this folder began since."""
    history = copy.epochs if copy else ()
    for start in own:
        if not history or start.epoch > history[-1].epoch:
            history = append_epoch(history, start)
    return history
