"""Found by Spark itself: it looks for `DefaultSource` in every package named `pyspark_…`.

`prepare()` before the first session lets Spark on this machine find a Java and this Python;
`register(spark)` after it makes the source known together with the session's S3A settings.
"""

from tierlog.spark_reader.environment import prepare
from tierlog.spark_reader.source import TierlogSource as DefaultSource
from tierlog.spark_reader.source import register

__all__ = ["DefaultSource", "prepare", "register"]
