"""Which walk is in use: the compiled one once `use` was called with it, else the plain one.

Rule: one switch for the process, thrown once, by `native.load`; both walks give the same answers.
"""

from __future__ import annotations

from record_format.batch import Buffer
from record_format.record_walk import Walk, Walker, WalkRequest, walk_plain

_in_use: list[Walker] = [walk_plain]


def use(walker: Walker) -> None:
    """Make `walker` the walk of this process."""
    _in_use[0] = walker


def walk(records: Buffer, request: WalkRequest) -> Walk:
    """Walk all records of a batch, by the fastest walk that is loaded."""
    return _in_use[0](records, request)
