"""Claim: a client that waits costs next to nothing, and is woken at once.

* Measured: 5,000 idle tails of one partition, each on its own connection: memory that they add to
  the broker (proportional set size), and its CPU; then, with the 5,000 still there, the time from a
  produce's first byte to the event at one tail of another partition.
* Measured: the same from produce to tail, one durable record at a time, alone.
* Measured: one record sent to all 5,000: the time until the last has it, and the broker's CPU.
* Peer: the response to the produce itself, which has waited for the same disk.

`python -m bench tails`; takes about a minute, and 5,000 descriptors in each of two processes.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench import children
from bench.children import Server
from bench.report import Report, Target, percentile
from bench.rounds import cpu_seconds_of
from bench.wire import Wire
from tierlog.client.client import Client

ROUNDS: Final = 3
TAILS: Final = 5_000
IDLE_S: Final = 3
WAKE_UPS: Final = 200
MIB: Final = 1 << 20
_PARTITION: Final = "/v1/topics/{}/partitions/0/{}"
_TIMEOUT_S: Final = 60


def measure(folder: Path, *, rounds: int) -> Report:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * TAILS)), hard))
    report = Report(
        name="tails", title=f"Tails, {TAILS:,} of them at rest", peer="the produce's answer"
    )
    with children.broker(folder) as broker:
        with Client(broker.url) as client:
            client.create_topic("idle")
            client.create_topic("busy")
        alone = [_wake_latencies(broker) for _ in range(rounds + 1)][1:]
        _add_latencies(report, "produce to tail, alone", alone, (3.0, 15.0))
        before = _memory_bytes(broker)
        with _many_tails(broker) as tails:
            grown = (_memory_bytes(broker) - before) / MIB
            target = Target(value=150, at_most=True, of_ratio=False)
            report.add("memory that they add", "MiB", [grown], target=target)
            report.add("memory of one", "KiB", [grown * 1024 / TAILS])
            report.add("CPU of the broker at rest", "%", [_idle_cpu_percent(broker)])
            beside = [_wake_latencies(broker) for _ in range(rounds)]
            _add_latencies(report, "wake-up of one beside them", beside, (5.0, None))
            spent = [_send_to_all(broker, tails) for _ in range(rounds)]
        report.add("one record told to all, the last has it after", "ms", [one[0] for one in spent])
        report.add("one record told to all, CPU of the broker", "ms", [one[1] for one in spent])
    return report


def _add_latencies(
    report: Report,
    name: str,
    rounds: Sequence[tuple[list[float], list[float]]],
    targets: tuple[float | None, float | None],
) -> None:
    for share, most in zip((0.5, 0.99), targets, strict=True):
        report.add(
            f"{name}, p{share * 100:.0f}",
            "ms",
            [percentile(events, share) for events, _ in rounds],
            [percentile(responses, share) for _, responses in rounds],
            target=Target(value=most, at_most=True, of_ratio=False) if most else None,
        )


def _wake_latencies(broker: Server) -> tuple[list[float], list[float]]:
    """Milliseconds from sending a record to its event, and to its response."""
    events: list[float] = []
    responses: list[float] = []
    with Wire(broker) as producer, Wire(broker) as tail:
        tail.start_stream(tail.request("GET " + _PARTITION.format("busy", "tail")))
        line = "POST " + _PARTITION.format("busy", "records")
        for number in range(WAKE_UPS):
            value = b"value-%d." % number
            request = producer.request(line, value, Content_Type="application/octet-stream")
            began = time.perf_counter()
            producer.sock.sendall(request)
            arrived = {producer: 0.0, tail: 0.0}
            with selectors.DefaultSelector() as selector:
                for wire in producer, tail:
                    selector.register(wire.sock, selectors.EVENT_READ, wire)
                while not all(arrived.values()):
                    for wire, data in _received(selector):
                        if wire is producer or value in data:
                            arrived[wire] = time.perf_counter()
            responses.append((arrived[producer] - began) * 1000)
            events.append((arrived[tail] - began) * 1000)
    return events, responses


def _received(selector: selectors.BaseSelector) -> list[tuple[Wire, bytes]]:
    """What has arrived, by connection. Raises RuntimeError if nothing does, or at an end."""
    ready = selector.select(_TIMEOUT_S)
    if not ready:
        raise RuntimeError(f"nothing arrived within {_TIMEOUT_S} s")
    return [(key.data, key.data.read_some()) for key, _ in ready]


@contextlib.contextmanager
def _many_tails(broker: Server) -> Iterator[list[Wire]]:
    with contextlib.ExitStack() as opened:
        wires = [opened.enter_context(Wire(broker)) for _ in range(TAILS)]
        for wire in wires:
            wire.start_stream(wire.request("GET " + _PARTITION.format("idle", "tail")))
        yield wires


def _memory_bytes(broker: Server) -> int:
    with open(f"/proc/{broker.pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    raise AssertionError("Linux reports a process's proportional set size")


def _idle_cpu_percent(broker: Server) -> float:
    before = cpu_seconds_of(broker.pid)
    time.sleep(IDLE_S)
    return (cpu_seconds_of(broker.pid) - before) / IDLE_S * 100


def _send_to_all(broker: Server, tails: Sequence[Wire]) -> tuple[float, float]:
    """Milliseconds until the last tail has one record, and of the broker's CPU time for it."""
    cpu_before = cpu_seconds_of(broker.pid)
    with selectors.DefaultSelector() as selector, Wire(broker) as producer:
        for tail in tails:
            selector.register(tail.sock, selectors.EVENT_READ, tail)
        value = b"to all %d." % time.monotonic_ns()
        line = "POST " + _PARTITION.format("idle", "records")
        began = time.perf_counter()
        producer.timed(producer.request(line, value, Content_Type="application/octet-stream"))
        waiting = len(tails)
        while waiting:
            for tail, data in _received(selector):
                if value in data:
                    selector.unregister(tail.sock)
                    waiting -= 1
        seconds = time.perf_counter() - began
    return seconds * 1000, (cpu_seconds_of(broker.pid) - cpu_before) * 1000
