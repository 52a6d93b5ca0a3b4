"""What commands share that work on a bucket without a broker.

The options are those of `serve`: the same names, the same variables, AWS's own chain for
credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cold_tier.object_store import ObjectStore

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="TIERLOG_STORE",
        help="s3://bucket/prefix or file:///folder.",
        metavar="URL",
    ),
]
OfflineStoreOption = Annotated[
    str | None,  # of no variable: that a store is known is no wish to go past the broker
    typer.Option("--store", metavar="URL", help="Offline: the bucket by itself, no broker."),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--s3-endpoint",
        envvar="TIERLOG_S3_ENDPOINT",
        help="URL of an S3 server that is not AWS.",
        metavar="URL",
    ),
]
RegionOption = Annotated[
    str | None,
    typer.Option(
        "--s3-region",
        envvar="TIERLOG_S3_REGION",
        help="Region, where AWS's own configuration does not say it.",
        metavar="REGION",
    ),
]


@contextmanager
def opened_store(
    url: str, endpoint: str | None = None, region: str | None = None
) -> Iterator[ObjectStore]:
    from cold_tier.open import open_store

    store = open_store(url, endpoint=endpoint, region=region, must_exist=True)
    try:
        yield store
    finally:
        store.close()
