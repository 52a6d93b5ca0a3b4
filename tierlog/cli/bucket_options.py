"""The options of commands that open a bucket without a broker.

They are those of `serve`: the same names, variables and AWS credential chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.option_groups import setting_option
from tierlog.record_format.errors import StoreUnavailable

if TYPE_CHECKING:
    from tierlog.cli.bucket_reader import BucketReader
    from tierlog.host.retry import RetryPolicy
    from tierlog.object_store.store import ObjectStore

StoreOption = Annotated[
    str, setting_option("store", metavar="URL", help="s3://bucket/prefix or file:///folder.")
]
OfflineStoreOption = Annotated[
    str | None,  # no variable: TIERLOG_STORE is not a request to bypass the broker
    typer.Option("--store", metavar="URL", help="Read this bucket directly, without a broker."),
]
EndpointOption = Annotated[str | None, setting_option("s3.endpoint", metavar="URL")]
RegionOption = Annotated[str | None, setting_option("s3.region", metavar="NAME")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Which bucket, and how to reach it."""

    store: StoreOption
    endpoint: EndpointOption = None
    region: RegionOption = None

    @classmethod
    def if_given(
        cls, store: str | None, endpoint: str | None, region: str | None
    ) -> BucketOptions | None:
        """None if no store is given."""
        return None if store is None else cls(store=store, endpoint=endpoint, region=region)

    @property
    def flags(self) -> list[str]:
        """As arguments of a command line."""
        given = {
            "--store": self.store,
            "--s3-endpoint": self.endpoint,
            "--s3-region": self.region,
        }
        return [part for flag, value in given.items() if value for part in (flag, value)]

    def open(self, policy: RetryPolicy | None = None) -> ObjectStore:
        """Open the store, by default with a broker's retries. Raises ConfigurationError if there is
        no such bucket.
        """
        from tierlog.object_store.open import open_store
        from tierlog.object_store.s3_connection import S3Options

        options = S3Options(endpoint=self.endpoint or None, region=self.region or None)
        return open_store(self.store, options, must_exist=True, policy=policy)

    @contextmanager
    def opened(self) -> Iterator[ObjectStore]:
        """For reading without a broker: retries ride out an outage."""
        from tierlog.host.retry import OUTAGE_POLICY

        store = self.open(OUTAGE_POLICY)
        try:
            yield store
        except StoreUnavailable as error:
            raise StoreUnavailable(f"store {self.store}: {error}") from error
        finally:
            store.close()

    @contextmanager
    def reader(self) -> Iterator[BucketReader]:
        """Open the bucket for reading its topics, manifests and segments without a broker."""
        from tierlog.cli.bucket_reader import BucketReader

        with self.opened() as store:
            yield BucketReader(store)
