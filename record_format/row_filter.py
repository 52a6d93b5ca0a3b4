"""Which rows a reader wants. Apart from the decoder, so that planning a read need not load it."""

from __future__ import annotations

from typing import NamedTuple

from tierlog.record_format.record_walk import I64_MAX, I64_MIN


class RowFilter(NamedTuple):
    """A range of offsets and of timestamps (ms).

    `last_timestamp` is inclusive, so that the default includes every timestamp.
    """

    start_offset: int = 0
    end_offset: int = I64_MAX
    start_timestamp: int = I64_MIN
    last_timestamp: int = I64_MAX

    def may_match(self, min_timestamp: int | None, max_timestamp: int | None) -> bool:
        """Whether records with these timestamp bounds can match; None is an unknown bound."""
        is_too_new = min_timestamp is not None and min_timestamp > self.last_timestamp
        is_too_old = max_timestamp is not None and max_timestamp < self.start_timestamp
        return not is_too_new and not is_too_old
