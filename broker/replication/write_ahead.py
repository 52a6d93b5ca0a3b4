"""The bucket as a member of the in-sync set: numbered write-ahead objects, and how they are fenced.

* A chain belongs to one life of one broker: its objects are numbered from 0 by the writer's own
  count, never by "the next free number". Each has what all partitions of the broker got since the
  last. A number that another object has means that the writer is fenced (R12).
* At most IN_FLIGHT_MAX objects are on their way. They may land late and in any order, and are
  acknowledged in order. So who finds number n knows that all up to n - IN_FLIGHT_MAX were
  acknowledged, and if one of those is missing, that it was collected.
* Who reads a chain on behalf of STORE closes it first. It is closed when a LIST shows the numbers
  of that window below its highest object taken, by objects or by fences, and a fence above it:
  nothing is acknowledged that is not below a fence's number. A LIST may be out of date when the
  fence lands: what it showed as missing may have been there and collected, and then the writer
  goes on above the fence. Hence another LIST after each fence, until one finds it closed (H4).
* Fences are never collected, nor is the highest object of a chain that is not closed: a LIST of a
  chain that was written to always shows where it ends.
* A process may lead twice with one chain. What it wrote under another epoch is not of STORE's log:
  its own may have been cut meanwhile, and each claim names the log that it begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

IN_FLIGHT_MAX: Final = 4
"""Part of the format: a reader relies on it."""


class Slice(NamedTuple):
    """A partition's part of an object: batches [base_offset, end_offset), written under `epoch`."""

    number: int
    epoch: int
    base_offset: int
    end_offset: int


def next_fence(listed: Mapping[int, bool], *, window: int = IN_FLIGHT_MAX) -> int | None:
    """Where the next fence is created; None if the chain is closed.

    `listed`: by number, whether it is a fence, of a LIST that began after the last fence was
    answered.
    """
    objects = [n for n, is_fence in listed.items() if not is_fence]
    highest = max(objects, default=-1)
    in_window = range(max(0, highest - window + 1), highest)
    missing = next((n for n in in_window if n not in listed), None)
    if missing is None and max(listed, default=-1) == highest:
        return highest + 1
    return missing


def store_slices(slices: Iterable[Slice], *, epoch: int, end_offset: int) -> Iterator[Slice]:
    """The slices of a closed chain that continue the manifest's end, in order.

    `epoch`: of the version whose chain this is. `end_offset`: of the manifest, read after the LIST
    that found the chain closed.
    """
    for one in sorted(slices):
        if one.epoch != epoch or one.end_offset <= end_offset:
            continue
        if one.base_offset > end_offset:
            return
        end_offset = one.end_offset
        yield one


def collectable(
    listed: Mapping[int, bool], covered: Mapping[int, bool], *, window: int = IN_FLIGHT_MAX
) -> list[int]:
    """The numbers that may be deleted: `covered` says whether every partition's manifest reaches
    above what an object has. The highest goes once the chain is closed.
    """
    kept = -1
    if next_fence(listed, window=window) is not None:
        kept = max((n for n, is_fence in listed.items() if not is_fence), default=-1)
    return [n for n, fence in listed.items() if n != kept and not fence and covered[n]]
