"""Which rows a reader wants: a light module, because planning a read need not load the decoder."""

from __future__ import annotations

from typing import NamedTuple

from record_format.record_walk import I64_MAX, I64_MIN


class Cut(NamedTuple):
    """Rows to give. The last timestamp (ms) is inclusive, so that any time is in the default."""

    start_offset: int = 0
    end_offset: int = I64_MAX
    start_timestamp: int = I64_MIN
    last_timestamp: int = I64_MAX

    def may_hold(self, min_timestamp: int | None, max_timestamp: int | None) -> bool:
        """Whether such records may be wanted by their time; an unknown bound is None."""
        is_too_new = min_timestamp is not None and min_timestamp > self.last_timestamp
        is_too_old = max_timestamp is not None and max_timestamp < self.start_timestamp
        return not is_too_new and not is_too_old
