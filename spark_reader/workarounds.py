"""What stands here because of Spark, and goes when Spark mends it: nothing else of this room uses
its private members, or knows of its faults.

* `QuickAckOnUnpickle`: Spark sends a task as two small writes, without TCP_NODELAY. SPARK-51667 set
  it for the state server only; goes with a version that sets it for the sockets of workers.
* `FILTERS_BY_SCAN`: up to 4.3, Spark keeps pushed filters per `load()`, not per scan, so that other
  scans of the same frame would be filtered too, and miss rows. Goes with the oldest version that
  has SPARK-58551 (`pushLimit`, Spark 5).
* `PushFilters`: Spark refuses a reader that overrides `pushFilters` while
  `spark.sql.python.filterPushdown.enabled` (SPARK-51271) is off; goes when it is on by default.
* `FailedStreamReader`: an error of `streamReader` becomes an UnboundLocalError, since the runner
  (up to 4.3; not reported) stops a reader that it does not have. Goes with one that does not.
* `in_brief`: Spark shows all calls of its planning process before what an error says, or, with
  `spark.sql.execution.pyspark.udf.hideTraceback.enabled`, nobody's. Goes with a Spark that shows
  the message first.
* `interrupt_deferred`: if its start is interrupted, PySpark leaves the JVM running forever, holding
  our pipes (up to 4.3; not reported).
* `hadoop_of`: PySpark has no public door to Hadoop's file systems and credentials (not asked for).
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader

from tierlog.record_format.errors import TierlogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])

_LOOPBACK: Final = ("127.0.0.1", "::1")
_OPEN_FILES: Final = Path("/proc/self/fd")


def in_brief(method: F) -> F:
    """For what Spark calls to plan: an error of ours says what to do, and leaves the calls out."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TierlogError as error:
            said = error.with_traceback(None)
        raise said from None

    return cast(F, call)


class QuickAckOnUnpickle:
    """Avoids a delayed ACK of 40 ms at the start of each task. Has no effect except on Linux.

    The JVM's second write, the partition, waits until its first, the command, is acknowledged
    (Nagle, RFC 896), which Linux delays on a connection with request-response traffic (RFC 1122,
    4.2.3.2). Unpickling the command unpickles our reader, which then acknowledges it.
    """

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


FILTERS_BY_SCAN: Final = hasattr(DataSourceReader, "pushLimit")


class PushFilters:
    """`pushFilters` of a reader, which Spark compares with the base class's by its `__func__`."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push: Callable[[list[Any]], Iterable[Any]]) -> None:
        self._push = push

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        return self._push(filters)


class FailedStreamReader(DataSourceStreamReader):  # type: ignore[misc]
    """A stream reader that could not be created, which raises the error on first use."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _fail(self, *_: object) -> NoReturn:
        raise self._error

    initialOffset = latestOffset = partitions = read = _fail  # noqa: N815  Spark's names


class Hadoop(NamedTuple):
    """py4j's view of the JVM, and the session's Hadoop configuration in it."""

    jvm: Any
    conf: Any


def hadoop_of(session: SparkSession) -> Hadoop | None:
    """None with Spark Connect, which has no JVM of its own."""
    java_session = getattr(session, "_jsparkSession", None)
    if java_session is None:
        return None
    return Hadoop(session._jvm, java_session.sessionState().newHadoopConf())  # noqa: SLF001


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C until Spark has started; a second one takes effect at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        sys.stderr.write("tierlog: stopping once Spark has started\n")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # keep Spark's own handler, which cancels jobs
            signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
