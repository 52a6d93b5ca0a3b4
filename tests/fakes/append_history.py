"""Clients that append with `If-Offset-Match`, the history of their answers, and a checker of it.

A history is a list of rows, one for each append, which Porcupine reads as JSON lines. An append
that is not answered, or whose outcome is unknown, may take effect at any time after its call.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Literal, NamedTuple

import httpx2

from tests.fakes.broker_process import BrokerProcess

Outcome = Literal["ok", "unknown", "refused", "mismatch"]


class Row(NamedTuple):
    """`expected`: the offset that was given, at which the value is if it was appended. `end`: where
    the log ended, by a 412 (`mismatch`). `called`, `returned`: in ns, of one clock.
    """

    client: int
    called: int
    returned: int
    expected: int
    value: str
    outcome: Outcome
    end: int = -1


class Appender(threading.Thread):
    """Appends where it believes that the log ends; others do so too."""

    def __init__(
        self, client: int, brokers: Sequence[BrokerProcess], topic: str, *, answer_s: float
    ) -> None:
        super().__init__(daemon=True)
        self._client, self._brokers = client, brokers
        self._path = f"/v1/topics/{topic}/partitions/0/records"
        self._answer_s, self._stopping = answer_s, threading.Event()
        self._end = self._turn = 0
        self.rows: list[Row] = []

    def run(self) -> None:
        with httpx2.Client(timeout=self._answer_s) as api:
            while not self._stopping.wait(0.01):
                self._append(api)

    def _append(self, api: httpx2.Client) -> None:
        self._turn += 1
        broker = self._brokers[(self._client + self._turn) % len(self._brokers)]
        expected, value = self._end, f"{self._client}-{self._turn}"
        called = time.monotonic_ns()
        try:
            answer = api.post(
                broker.url + self._path,
                headers={"if-offset-match": str(expected)},
                json={"records": [{"value": value}]},
            )
            outcome = self._outcome(answer)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            outcome = "refused"
        except httpx2.TransportError:
            outcome = "unknown"
        end = self._end if outcome == "mismatch" else -1
        row = Row(self._client, called, time.monotonic_ns(), expected, value, outcome, end)
        self.rows.append(row)

    def _outcome(self, answer: httpx2.Response) -> Outcome:
        body = answer.json()
        if answer.status_code == 200:
            assert body["results"][0]["base_offset"] == self._end
            self._end += 1
            return "ok"
        if answer.status_code == 412:
            self._end = body["log_end_offset"]
            return "mismatch"
        return "unknown" if body.get("outcome") == "unknown" else "refused"

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)


def as_json_lines(rows: Iterable[Row], log: Sequence[str]) -> str:
    """`log`: its values as they were read at the end, which is the last row."""
    lines = [
        {
            "client": one.client,
            "call": one.called,
            "return": one.returned,
            "expected": one.expected,
            "value": one.value,
            "outcome": one.outcome,
            "end": one.end,
        }
        for one in rows
    ]
    end = max((one["return"] for one in lines), default=0)
    read = {"client": -1, "call": end + 1, "return": end + 2, "outcome": "read", "log": [*log]}
    return "".join(f"{json.dumps(line)}\n" for line in (*lines, read))


def find_fault(rows: Sequence[Row], log: Sequence[str]) -> str | None:
    """Why the history is not linearizable; None if it is.

    The log is the order in which appends took effect. So it is to have each that was acknowledged
    where that said, others only if their outcome is unknown, and none twice. A 412 has its place
    between two of them. Nothing was called after what comes behind it had returned.
    """
    by_value = {row.value: row for row in rows if row.outcome != "mismatch"}
    in_order = list[tuple[int, Row]]()
    for offset, value in enumerate(log):
        row = by_value.pop(value, None)
        if row is None:
            return f"{value} at {offset} is there twice, or was never sent, or was refused"
        if row.expected != offset or row.outcome == "refused":
            return f"{value} is at {offset}: {row}"
        in_order.append((2 * offset + 1, row))
    for row in (one for one in rows if one.outcome == "mismatch"):
        if row.end == row.expected or row.end > len(log):
            return f"the log ended nowhere like that: {row}"
        in_order.append((2 * row.end, row))
    lost = [row for row in by_value.values() if row.outcome == "ok"]
    return f"acknowledged, and not there: {lost[:3]}" if lost else _out_of_order(in_order)


def _out_of_order(placed: list[tuple[int, Row]]) -> str | None:
    latest: Row | None = None  # of those before, the one that was called last
    for _, group in groupby(sorted(placed, key=itemgetter(0)), key=itemgetter(0)):
        here = [row for _, row in group]
        for row in here:
            is_known = row.outcome != "unknown"
            if is_known and latest is not None and row.returned < latest.called:
                return f"{row} comes behind {latest}, which was called later"
        latest = max((latest, *here) if latest else here, key=attrgetter("called"))
    return None
