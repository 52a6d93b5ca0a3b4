"""Store costs use the operator's prices."""

import pytest

from tierlog.object_store.ledger import PriceTable


def test_the_storage_report_uses_the_configured_prices(harness):
    prices = PriceTable(put_per_1000=0.0, get_per_1000=2000.0, list_per_1000=0.0)
    broker = harness.restart(prices=prices)
    report = broker.storage_report()
    uses = [use for use in report.store_requests if use.operation in {"get", "head"}]
    gets = sum(use.requests for use in uses)
    assert gets > 0
    assert report.cost_dollars == pytest.approx(2.0 * gets)
