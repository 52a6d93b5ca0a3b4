"""Gather records into requests, for `tierlog produce`.

* A request is sent when it is full, or when its first record has waited `LINGER_S` and no more
  input is there: typed lines, or a log that is followed, are not held back to fill a request.
* A refusal names records, or lines, by their number in the whole input, from 1, not in a request.
"""

from __future__ import annotations

import io
import re
import select
import time
from collections.abc import Callable
from typing import Final

from record_format.errors import TierlogError
from tierlog.client.records import NewRecord

LINGER_S: Final = 0.1
_IN_A_REQUEST: Final = re.compile(r"records\[(\d+)\]|\bline (\d+)(?=[.:])")

Item = NewRecord | bytes


class Gathering:
    """What waits to be sent by `send`: records, or lines that the broker parses."""

    def __init__(
        self, send: Callable[[list[Item]], None], *, max_records: int, max_bytes: int
    ) -> None:
        self._send = send
        self._max_records, self._max_bytes = max_records, max_bytes
        self._held: list[Item] = []
        self._numbers: list[int] = []
        self._held_bytes = 0
        self._due_s = 0.0

    def add(self, number: int, item: Item) -> None:
        """`number`: its place in the whole input."""
        if not self._held:
            self._due_s = time.monotonic() + LINGER_S
        self._held.append(item)
        self._numbers.append(number)
        parts = (item,) if isinstance(item, bytes) else item[:2]
        self._held_bytes += 64 + sum(len(one) for one in parts if isinstance(one, (bytes, str)))
        if len(self._held) >= self._max_records or self._held_bytes >= self._max_bytes:
            self.send()

    def send(self) -> None:
        """Send all that is held. Raises the broker's error."""
        held, self._held, self._held_bytes = self._held, [], 0
        numbers, self._numbers = self._numbers, []

        def in_the_input(found: re.Match[str]) -> str:
            of_record, of_line = found.groups()
            if of_record is not None:
                return f"record {numbers[int(of_record)]}"
            return f"line {numbers[int(of_line) - 1]}"

        if not held:
            return
        try:
            self._send(held)
        except TierlogError as error:
            error.args = (_IN_A_REQUEST.sub(in_the_input, str(error)), *error.args[1:])
            raise

    def patience_ms(self) -> float | None:
        """How long what is held may wait for more; None if nothing is held."""
        return max(0.0, self._due_s - time.monotonic()) * 1000 if self._held else None


class LiveInput(io.RawIOBase):
    """A file, a pipe or a terminal; what is gathered is sent before too long a wait for more."""

    def __init__(self, source: io.FileIO, gathering: Gathering) -> None:
        self._source, self._gathering = source, gathering
        self._more = select.poll()  # select() takes no descriptor above 1,023
        self._more.register(source, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        # Also if nothing is held: a pipe that does not block would seem to be at its end.
        while not self._more.poll(self._gathering.patience_ms()):
            self._gathering.send()
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()
