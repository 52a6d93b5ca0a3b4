"""Work on a cluster, a task for each number: what a task returns comes back to the driver.

* Spark tries a task again where it fails, and may run it twice at once: each try does all of the
  work, and of one alone the result is taken.
* An error of ours that another try does not mend is not tried again: it is raised by the driver as
  it was on the executor.
* What a task carries is pickled, and sent as bytes: it is in no plan and in no line of a log.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tierlog.record_format.errors import ConfigurationError, RetriableError, TierlogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class TasksFailed(RetriableError):
    """Spark gave up on a task."""


def run_tasks(
    session: SparkSession, work: Callable[[int], tuple[object, ...]], count: int, *, returns: str
) -> list[Any]:
    """What `work` returned for each number below `count`, as a row of the columns in `returns`.

    Raises TasksFailed, ConfigurationError if an executor lacks a package, and what `work` raises.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql.functions import udf

    # Arrow's functions need pandas.
    run = udf(_Run(pickle.dumps(work)), f"done struct<{returns}>, error binary", useArrow=False)
    numbers = session.range(0, count, 1, count)  # one to a task
    try:
        rows = [row["of"] for row in numbers.select(run("id").alias("of")).collect()]
    except (PySparkException, Py4JJavaError) as error:
        raise TasksFailed(f"a task on Spark failed: {last_line(str(error))}") from error
    for row in rows:
        if row["error"] is not None:
            raise pickle.loads(bytes(row["error"]))  # noqa: S301  our own executor's
    return [row["done"] for row in rows]


class _Run(NamedTuple):
    """What a task calls. What the work needs is imported then, so that what an executor lacks has a
    name.
    """

    packed: bytes

    def __call__(self, number: int) -> tuple[object, object]:
        try:
            return pickle.loads(self.packed)(number), None  # noqa: S301  of our own driver
        except ImportError as error:
            text = f"an executor lacks a package that the driver has: {error}, for {sys.executable}"
            return None, pickle.dumps(ConfigurationError(text))
        except RetriableError:
            raise
        except TierlogError as error:
            return None, pickle.dumps(error)


_OUR_ERRORS = ("record_format.", "spark_reader.", "tierlog.")


def last_line(text: str) -> str:
    """The last line of a Python traceback inside Spark's error."""
    before_java = text.partition("\n\tat ")[0].partition("JVM stacktrace")[0]
    lines = [line.strip() for line in before_java.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OUR_ERRORS)]
    if ours:  # without the class name
        return ours[-1].partition(": ")[2] or ours[-1]
    reasons = [line for line in lines if not line.startswith("SQLSTATE:")]
    return (reasons or [text])[-1]
