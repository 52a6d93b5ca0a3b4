"""The store of another cluster is refused, with a hint at `restore`."""

from pathlib import Path

import pytest

from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from record_format.errors import ConfigurationError


def open_broker(root: Path, *, data: str, store: str) -> Broker:
    settings = BrokerSettings(data_dir=root / data, cache_bytes=1 << 20, disk_reserve_bytes=0)
    return Broker.open(settings, store=open_store(f"file://{root / store}"))


@pytest.mark.parametrize("data", ["used", "new"])
def test_the_store_of_another_cluster_is_refused_with_a_hint_at_restore(
    tmp_path: Path, data: str
) -> None:
    open_broker(tmp_path, data="one", store="store-one").close()
    open_broker(tmp_path, data="used", store="store-used").close()
    with pytest.raises(ConfigurationError, match="tierlog storage restore --store file:"):
        open_broker(tmp_path, data=data, store="store-one")
