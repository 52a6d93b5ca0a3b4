"""Found by Spark itself: it looks for `DefaultSource` in every package named `pyspark_…`.

`prepare()` before the first session lets Spark on this machine find a Java and this Python;
`register(spark)` after it makes the source known together with the session's S3A settings.
"""

from spark_reader.environment import prepare
from spark_reader.source import TierlogSource as DefaultSource
from spark_reader.source import register

__all__ = ["DefaultSource", "prepare", "register"]
