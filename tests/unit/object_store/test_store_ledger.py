"""What requests are for, and what they cost."""

import pytest

from tierlog.object_store.ledger import PriceTable, StoreLedger, purpose_of


def test_the_purpose_follows_from_operation_and_key():
    log = "topics/t/i/0/segments/x.log"
    assert purpose_of("put", log) == purpose_of("head", log) == "offload"
    assert purpose_of("get", log) == "cold_read"
    assert purpose_of("put", "topics/t/i/0/manifest/1.json") == "manifest"
    assert purpose_of("put", "wal/a/1/2.wal") == purpose_of("get", "wal/a/1/2.wal") == "write_ahead"
    assert purpose_of("list", log) == "list"
    assert purpose_of("delete", log) == "delete"
    assert purpose_of("put", "probe/run/x") == "probe"


def test_the_ledger_sums_usage_and_computes_its_cost():
    ledger = StoreLedger()
    for _ in range(2000):
        ledger.count("put", "t/segments/x.log", sent_bytes=5)
    ledger.count("get", "t/segments/x.log", failures=1)
    ledger.count("get", "t/segments/x.log", requests=0, received_bytes=2_000_000_000)
    usage = ledger.usage()
    assert usage["offload", "put"] == (2000, 0, 10_000, 0)
    assert usage["cold_read", "get"] == (1, 1, 0, 2_000_000_000)
    assert (ledger.requests(), ledger.requests("cold_read")) == (2001, 1)
    prices = PriceTable(put_per_1000=1.0, get_per_1000=1.0, received_per_gb=0.5)
    assert prices.cost("put", usage["offload", "put"]) == pytest.approx(2.0)
    assert prices.cost("get", usage["cold_read", "get"]) == pytest.approx(1.001)
