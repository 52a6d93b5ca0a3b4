from xml.etree import ElementTree

from tierlog.spark_reader.jobs.stats import HOUR_MS, MAX_BARS, HourStats, chart_svg


def row(hour):
    sizes = dict.fromkeys(HourStats._fields, 1)
    return HourStats(**{**sizes, "hour_ms": hour * HOUR_MS, "partition": 0})


def test_a_chart_has_no_more_bars_than_its_maximum():
    """Where the first bar begins before the first hour, too: bars begin at multiples of hours."""
    for first in (0, 1, 23, 87_599):
        for hours in (1, MAX_BARS, MAX_BARS + 1, 2 * MAX_BARS, 24 * MAX_BARS, 87_601 * MAX_BARS):
            shown = range(first, first + hours, max(1, hours // (2 * MAX_BARS)))
            chart = ElementTree.fromstring(chart_svg([row(hour) for hour in shown], title="t"))
            bars = {one.get("x") for one in chart if one.tag.endswith("rect")} - {None}
            assert len(bars) <= MAX_BARS + 1, "and one rectangle of the legend"
