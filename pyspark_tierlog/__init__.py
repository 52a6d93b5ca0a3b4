"""Found by Spark itself: it looks for `DefaultSource` in every package named `pyspark_…`.

`register(spark)` makes it known together with the session's S3A settings.
"""

from spark_reader.registration import register
from spark_reader.source import TierlogSource as DefaultSource

__all__ = ["DefaultSource", "register"]
