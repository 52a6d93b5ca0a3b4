"""The Spark session of a job, and the reporting of its progress.

* An existing session (spark-submit, a notebook) is used as it is and left running. One that is
  created here is stopped at the end.
* Executors in other processes get tierlog's code as a zip, so that it need not be installed there.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tierlog.spark_reader.environment import prepare
from tierlog.spark_reader.jobs.package import build_zip
from tierlog.spark_reader.source import register
from tierlog.spark_reader.workarounds import interrupt_deferred

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER: Final = "local[*]"
POLL_INTERVAL_S: Final = 0.5

Progress = Callable[[int, int], None]
"""Called with the numbers of finished tasks and of all tasks of Spark's running stages."""


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
            if _has_remote_executors(session):
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
        builder = builder.master(master or LOCAL_MASTER)
    for key, value in config.items():
        builder = builder.config(key, value)
    with interrupt_deferred():
        session: SparkSession = builder.getOrCreate()
    return session


def _has_remote_executors(session: SparkSession) -> bool:
    """Whether executors run in other processes."""
    master: str = session.sparkContext.master
    return master != "local" and not master.startswith("local[")


@contextmanager
def progress_reported(session: SparkSession, progress: Progress | None) -> Iterator[None]:
    """Call `progress` periodically while the block runs."""
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
    while not over.wait(POLL_INTERVAL_S):
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        if known:
            done = sum(stage.numCompletedTasks for stage in known)
            progress(done, sum(stage.numTasks for stage in known))
