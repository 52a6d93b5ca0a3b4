"""What becomes of a local log that a folder takes over with: the decision alone.

| the local log                                   | becomes                                        |
|-------------------------------------------------|------------------------------------------------|
| holds records past the point where the          | those go to `<partition>.diverged-<epoch>/`:   |
| histories part, or within a gap of the manifest | never served, uploaded or deleted; reported    |
| ends below the manifest's end                   | begins at the manifest's end                   |
| reaches past the manifest's end                 | has a border of segments there                 |

Another owner may have acknowledged records that it never uploaded. So that their offsets are not
assigned again, the log continues above a recorded gap, which begins where the bucket ends:

| what stays of the local log                     | then                                           |
|-------------------------------------------------|------------------------------------------------|
| nothing past the manifest's end                 | it begins above the gap                        |
| records past it, of both histories              | they are uploaded; one commit has the claim,   |
|                                                 | them and the gap; then it begins above the gap |

* Pure: `take_over` acts on what is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manifest.epochs import assign, divergence_offset
from manifest.state import EpochStart, Manifest


class LocalLog(NamedTuple):
    """`history`: the epochs that this folder knows of, its own and those it saw in force.

    `recorded`: the (owner, epoch) pairs that it took or saw in force, also those under which
    nothing was written. `ranges`: [base, next) of its segments that hold something.
    """

    history: tuple[EpochStart, ...]
    recorded: frozenset[tuple[str, int]]
    ranges: tuple[tuple[int, int], ...]
    end_offset: int
    log_start_offset: int = 0


class TakeOverPlan(NamedTuple):
    """From `diverged_from` on the local log is set aside; then it begins at `start_at`, or stays,
    with a border at `split_at`. What stays past the manifest's end is to be uploaded before the
    log goes on at `resume_at`. None: nothing of the kind.
    """

    diverged_from: int | None = None
    start_at: int | None = None
    split_at: int | None = None
    resume_at: int | None = None


def plan_take_over(local: LocalLog, manifest: Manifest | None, *, gap: int) -> TakeOverPlan:
    """What becomes of the local log under this manifest."""
    end = manifest.end_offset if manifest else 0
    kept_end = _same_until(local, manifest) if manifest else local.end_offset
    start = end
    if gap:
        kept_end = _held_until(local, end, kept_end) if manifest else 0
        start = max(_reached(manifest), kept_end) + gap
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
    """The other log reached at least to where its last epoch began."""
    return max(manifest.end_offset, manifest.epochs[-1].start_offset) if manifest else 0


def _held_until(local: LocalLog, end: int, same_until: int) -> int:
    """Up to where, past the manifest's end too, the local log has every record of both histories.

    An attempt that died may have emptied it, and a trim may have gone past the manifest's end.
    """
    start = held = max(end, local.log_start_offset)
    for base, next_offset in local.ranges:
        if base <= held:
            held = max(held, next_offset)
    held = min(held, same_until)
    return held if held > start else min(end, same_until)


def _same_until(local: LocalLog, manifest: Manifest) -> int:
    """Below this offset the local records are those of the manifest's history."""
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
    """The last manifest seen in force, and what this folder began since."""
    history = copy.epochs if copy else ()
    for start in own:
        if not history or start.epoch > history[-1].epoch:
            history = assign(history, start)
    return history
