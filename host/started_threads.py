"""Thread pools that start all of their threads when they are created.

`ThreadPoolExecutor` starts a thread when a call is submitted. In a process that may have no more
threads, `submit` raises after it has queued the call, which another thread then makes: a request
that was answered with an error would take effect.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

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
