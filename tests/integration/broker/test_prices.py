"""What a store costs is told by the operator's own prices."""

import pytest

from cold_tier.store_ledger import PriceTable


def test_the_report_counts_with_the_prices_that_were_given(house):
    prices = PriceTable(put_per_1000=0.0, get_per_1000=2000.0, list_per_1000=0.0)
    broker = house.restart(prices=prices)
    report = broker.storage_report()
    asked = [use for use in report.store_requests if use.operation in {"get", "head"}]
    gets = sum(use.requests for use in asked)
    assert gets > 0
    assert report.cost_dollars == pytest.approx(2.0 * gets)
