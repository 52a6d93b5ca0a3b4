"""Batches records into produce requests, for `tierlog produce`.

* A request is sent when it is full, or when its first record has waited `LINGER_S` and no more
  input is available: typed lines, or a followed log, are not delayed to fill a request.
* Errors are changed to name records, or lines, by their number in the whole input, from 1, not in
  the request.
"""

from __future__ import annotations

import io
import re
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tierlog.client.records import NewRecord
from tierlog.record_format.errors import TierlogError

LINGER_S: Final = 0.1
_NUMBER_IN_REQUEST: Final = re.compile(r"records\[(\d+)\]|\bline (\d+)(?=[.:])")

Item = NewRecord | bytes


class RequestBatcher:
    """Buffers records, or lines that the broker parses, for `send`."""

    def __init__(
        self, send: Callable[[list[Item]], None], *, max_records: int, max_bytes: int
    ) -> None:
        self._send = send
        self._max_records, self._max_bytes = max_records, max_bytes
        self._items: list[Item] = []
        self._numbers: list[int] = []
        self._buffered_bytes = 0
        self._due_s = 0.0

    def add(self, number: int, item: Item) -> None:
        """`number`: the item's position in the whole input, from 1."""
        if not self._items:
            self._due_s = time.monotonic() + LINGER_S
        self._items.append(item)
        self._numbers.append(number)
        parts = (item,) if isinstance(item, bytes) else item[:2]
        self._buffered_bytes += 64 + sum(len(one) for one in parts if isinstance(one, (bytes, str)))
        if len(self._items) >= self._max_records or self._buffered_bytes >= self._max_bytes:
            self.send()

    def send(self) -> None:
        """Send everything that is buffered. Raises the broker's error."""
        items, self._items, self._buffered_bytes = self._items, [], 0
        numbers, self._numbers = self._numbers, []
        if not items:
            return
        try:
            self._send(items)
        except TierlogError as error:
            message = _NUMBER_IN_REQUEST.sub(partial(_number_in_input, numbers), str(error))
            error.args = (message, *error.args[1:])
            raise

    def remaining_linger_ms(self) -> float | None:
        """How long the buffered items may still wait for more; None if there are none."""
        return max(0.0, self._due_s - time.monotonic()) * 1000 if self._items else None


def _number_in_input(numbers: Sequence[int], found: re.Match[str]) -> str:
    """Unchanged if the request has no such record: the message may quote the name of a topic."""
    record_index, line_number = found.groups()
    index = int(line_number) - 1 if record_index is None else int(record_index)
    if not 0 <= index < len(numbers):
        return found[0]
    return f"{'line' if record_index is None else 'record'} {numbers[index]}"


class LiveInput(io.RawIOBase):
    """A file, a pipe or a terminal. If no input is available, the batcher sends when it is due."""

    def __init__(self, source: io.FileIO, batcher: RequestBatcher) -> None:
        self._source, self._batcher = source, batcher
        self._poll = select.poll()  # select() does not support descriptors above 1023
        self._poll.register(source, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        # Also with an empty buffer: a non-blocking pipe without input would seem to be at its end.
        while not self._poll.poll(self._batcher.remaining_linger_ms()):
            self._batcher.send()
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()
