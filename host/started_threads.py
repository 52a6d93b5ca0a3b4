"""Thread pools that start all of their threads when they are created, and single calls in threads.

`ThreadPoolExecutor` starts a thread when a call is submitted. In a process that may have no more
threads, `submit` raises after it has queued the call, which another thread then makes: a request
that was answered with an error would take effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tierlog.record_format.errors import TooManyThreads


def started_threads(count: int, *, name: str) -> ThreadPoolExecutor:
    """Raises TooManyThreads if the process may not have so many threads."""
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_started = threading.Barrier(count)
    try:
        for _ in range(count):
            threads.submit(all_started.wait)
    except RuntimeError as error:
        all_started.abort()
        threads.shutdown()
        text = f"this process may not have {count} more threads: {error}"
        raise TooManyThreads(text) from error
    return threads


def run_in_daemon_thread(call: Callable[[], object], *, name: str) -> Future[None]:
    """Call it in a thread for which the process does not wait when it exits: a request to a store
    may take a minute to time out. In the caller's thread if the process may not have another.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised by `result`
            done.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return done
