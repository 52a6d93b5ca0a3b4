"""Found by Spark itself: it looks for `DefaultSource` in every package named `pyspark_…`."""

from spark_reader.source import TierlogSource as DefaultSource

__all__ = ["DefaultSource"]
