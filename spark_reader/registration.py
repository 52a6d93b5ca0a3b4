"""`register(session)`: the source, together with what the session knows about S3.

Rule: what is registered is a class that holds the settings. Spark pickles it by value and hands it
to the process that plans, in which there is no session to be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reader.s3a import settings_of
from spark_reader.source import TierlogSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(session: SparkSession) -> None:
    """Let `format("tierlog")` in this session use its S3A settings (`fs.s3a.*`), as they are now.

    Later changes of settings take effect when it is called again. Without it the source is still
    found, and has its options and AWS's own chain. Spark Connect does not pass credentials on.
    """
    settings = {"s3a": settings_of(session)}
    session.dataSource.register(type("TierlogSourceOfSession", (TierlogSource,), settings))
