"""The session that a job runs in, and how far the job has got.

Rules that keep it honest:

* An existing session (spark-submit, a notebook) is used as it is and left running. One that was
  created here is stopped at the end.
* A master that is not this process gets our code as a zip, and nobody has to have installed it
  there.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_reader.environment import prepare
from spark_reader.jobs.package import build_zip
from spark_reader.registration import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE: Final = "local[*]"
LOOK_EVERY_S: Final = 0.5

Progress = Callable[[int, int], None]
"""Told of tasks that are done, and how many there are, of what Spark runs at the moment."""


@contextmanager
def job_session(
    name: str, *, master: str | None = None, config: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """The active session, or a new one on `master` (default: this machine's cores)."""
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    if existing is not None:
        register(existing)
        yield existing
        return
    session = _new_session(name, master, config or {})
    try:
        with tempfile.TemporaryDirectory(prefix="tierlog-zip-") as folder:
            if _is_elsewhere(session):
                session.sparkContext.addPyFile(str(build_zip(Path(folder) / "tierlog.zip")))
            register(session)
            yield session
    finally:
        session.stop()


def _new_session(name: str, master: str | None, config: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        prepare()
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        builder = builder.config("spark.ui.enabled", "false")
    if master is not None or not submitted:
        builder = builder.master(master or HERE)
    for key, value in config.items():
        builder = builder.config(key, value)
    with _interrupted_later():
        session: SparkSession = builder.getOrCreate()
    return session


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C waits until Spark has started; a second one does not.

    Broken off before, PySpark leaves the JVM behind for ever, with our pipes in its hands.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        sys.stderr.write("tierlog: ends once Spark has started\n")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # Spark's own cancels what runs: it stays
            signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _is_elsewhere(session: SparkSession) -> bool:
    """Whether executors are processes of their own."""
    master: str = session.sparkContext.master
    return master != "local" and not master.startswith("local[")


@contextmanager
def watched(session: SparkSession, progress: Progress | None) -> Iterator[None]:
    """Tell `progress` now and then how many tasks of the running stages are done."""
    if progress is None:
        yield
        return
    over = threading.Event()
    tracker = session.sparkContext.statusTracker()
    watcher = threading.Thread(target=_watch, args=(tracker, progress, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(tracker: Any, progress: Progress, over: threading.Event) -> None:
    while not over.wait(LOOK_EVERY_S):
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        if known:
            done = sum(stage.numCompletedTasks for stage in known)
            progress(done, sum(stage.numTasks for stage in known))
