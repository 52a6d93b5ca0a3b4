"""The server behind a store's URL was replaced since its last probe (kept for a week)."""

import pytest

from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.errors import ConfigurationError


class Server:
    """A server in front of the same objects."""

    def __init__(self, objects, *, url=None, ignores_conditions=False):
        self._objects, self.url = objects, url or objects.url
        self._ignores_conditions = ignores_conditions
        self.created = []

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def put(self, key, body, *, if_absent=False, crc32c=None):
        if key.startswith("probe/"):
            self.created.append(key)
        condition = if_absent and not self._ignores_conditions
        return self._objects.put(key, body, if_absent=condition, crc32c=crc32c)


@pytest.fixture
def start(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path, cache_bytes=1 << 20, disk_reserve_bytes=0)
    objects = MemoryStore("bucket")

    def start_broker(**options):
        store = Server(objects, **options)
        broker = Broker.open_idle(settings, store=store)
        broker.close()
        return len(store.created)

    assert start_broker() > 10, "the first start probes"
    return start_broker


def test_a_known_server_is_not_probed_again_within_a_week(start):
    assert start() == 1, "only a body with a wrong checksum"


def test_a_server_that_ignores_conditions_is_refused(start):
    with pytest.raises(ConfigurationError, match="ignores the condition of a PUT"):
        start(ignores_conditions=True)
    assert start() == 1


def test_a_new_endpoint_is_probed(start):
    assert start(url="s3://bucket at http://elsewhere") > 10
    assert start(url="s3://bucket at http://elsewhere") == 1
