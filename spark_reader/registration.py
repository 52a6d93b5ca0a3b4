"""`register(session)`: registers the source together with the session's S3A settings.

The registered class carries the settings. Spark pickles it by value and sends it to the planning
process, which has no session to query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reader.s3a import settings_of
from spark_reader.source import TierlogSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(session: SparkSession) -> None:
    """Make `format("tierlog")` in this session use its current S3A settings (`fs.s3a.*`).

    Call it again after changing them. Without it Spark still finds the source, which then uses its
    options and AWS's provider chain. Spark Connect does not forward credentials.
    """
    settings = {"s3a": settings_of(session)}
    session.dataSource.register(type("TierlogSourceOfSession", (TierlogSource,), settings))
