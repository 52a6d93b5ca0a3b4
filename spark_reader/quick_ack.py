"""Avoids a delayed ACK of 40 ms at the start of each Spark task.

The JVM sends a task as two small writes, the command and then the partition, on a socket without
TCP_NODELAY. The second waits until the first is acknowledged (Nagle, RFC 896), which Linux delays
by 40 ms on a connection with request-response traffic (RFC 1122, 4.2.3.2). Spark has fixed this
only for its state server (SPARK-51667). A worker runs our code between the two: unpickling the
command unpickles our reader, which then acknowledges it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_LOOPBACK: Final = ("127.0.0.1", "::1")
_OPEN_FILES: Final = Path("/proc/self/fd")


class QuickAckOnUnpickle:
    """Acknowledges the JVM's data when a reader is unpickled. Has no effect except on Linux."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if hasattr(socket, "TCP_QUICKACK"):
            for connection in _local_connections():
                with connection, suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _local_connections() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets that are connected to a loopback address."""
    for open_file in _OPEN_FILES.iterdir():
        with suppress(OSError):
            fd = int(open_file.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            is_blocking = os.get_blocking(fd)
            connection = socket.socket(fileno=os.dup(fd))
            os.set_blocking(fd, is_blocking)  # both are one file, and a default timeout changed it
            if _is_local_tcp(connection):
                yield connection
            else:
                connection.close()


def _is_local_tcp(connection: socket.socket) -> bool:
    is_tcp = connection.type == socket.SOCK_STREAM
    is_tcp &= connection.family in (socket.AF_INET, socket.AF_INET6)
    with suppress(OSError):
        return is_tcp and connection.getpeername()[0] in _LOOPBACK
    return False
