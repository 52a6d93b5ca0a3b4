"""Which rows a reader wants: a light leaf, for who plans a read need not load who decodes it."""

from __future__ import annotations

from typing import NamedTuple

from record_format.record_walk import I64_MAX, I64_MIN


class Cut(NamedTuple):
    """Rows to give. The last timestamp (ms) is inclusive, so that any time is in the default."""

    start_offset: int = 0
    end_offset: int = I64_MAX
    start_timestamp: int = I64_MIN
    last_timestamp: int = I64_MAX
