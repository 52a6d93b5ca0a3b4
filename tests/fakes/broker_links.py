"""A line between each two brokers of a cluster, for each direction in which one calls the other.

* A broker advertises the address of its own listener here, and who connects to it is found out from
  Linux: the process that has the other end.
* What connects and is none of the brokers, as a test, is closed: it knows the broker's own address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cuttable_proxy import Line, Listener


class BrokerLinks:
    """`between[a, b]`: where the broker of node id `a` calls `b`. `urls`: to advertise."""

    def __init__(self, brokers: Sequence[BrokerProcess]) -> None:
        self._brokers = brokers
        numbers = range(len(brokers))
        self.between = {(a, b): Line(brokers[b].url) for a in numbers for b in numbers}
        self.listeners = [Listener(partial(self._serve, number)) for number in numbers]
        self.urls = [one.url for one in self.listeners]

    def _serve(self, to: int, near: socket.socket) -> None:
        with near:
            caller = self._caller(near.getpeername()[1])
            if caller is not None:
                self.between[caller, to].forward(near)

    def _caller(self, port: int) -> int | None:
        socket_of_port = _socket_of(port)
        for number, broker in enumerate(self._brokers):
            if broker.process is not None and socket_of_port in _open_of(broker.process.pid):
                return number
        return None

    def of(self, broker: BrokerProcess, *, calls: bool = False, called: bool = False) -> list[Line]:
        """The lines on which it calls the others, or is called by them."""
        node_id = self._brokers.index(broker)
        return [
            line
            for (caller, to), line in self.between.items()
            if caller != to and ((calls and caller == node_id) or (called and to == node_id))
        ]

    def cut_ones(self) -> list[tuple[int, int]]:
        return [ends for ends, line in self.between.items() if line.is_cut]

    def mend(self) -> None:
        for line in self.between.values():
            line.mend()


def _socket_of(port: int) -> str:
    """How a process's open file reads that is the socket of this local port."""
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[1].endswith(f":{port:04X}") and fields[9] != "0":
            return f"socket:[{fields[9]}]"
    return ""


def _open_of(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for one in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(str(Path(one).readlink()))
    return found


@contextmanager
def broker_links(brokers: Sequence[BrokerProcess]) -> Iterator[BrokerLinks]:
    links = BrokerLinks(brokers)
    with ExitStack() as stack:
        for listener in links.listeners:
            stack.enter_context(listener)
        yield links
        for line in links.between.values():
            line.cut()
