"""Topics as a Polars LazyFrame, which reads batch by batch while it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from tierlog.spark_reader.arrow_dataset import dataset


def scan_polars(topics: str | Sequence[str], **options: Any) -> pl.LazyFrame:
    """Topics as a LazyFrame over both tiers, of the offsets that exist now.

    `options` are those of `tierlog.dataset`. Polars hands over the columns, the filter and the
    limit of each query, which decide what of the log is fetched; what it cannot say in Arrow's
    terms it applies to the rows. With `collect(engine="streaming")` or `sink_parquet`, memory is
    that of the rows that are read ahead.
    """
    return pl.scan_pyarrow_dataset(dataset(topics, **options))
