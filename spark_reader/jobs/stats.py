"""Statistics of a topic's records, bytes, keys and sizes, by hour and partition; and their chart.

* Hours are those of the records' timestamps, in UTC.
* Bytes are those of keys and values before compression; their size in the log differs.
* Distinct keys and percentiles are Spark's estimates (within 5% and 1%), and named so; all else is
  exact.
* The chart is an SVG that loads nothing when it is viewed: records and bytes over time, stacked by
  partition, unless there are more partitions than distinguishable colours. Hours are combined until
  there are at most `MAX_BARS` bars; the chart says how many hours a bar is. An hour without records
  is shown as a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog.spark_reader.jobs.session import Progress, progress_reported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS: Final = 3_600_000

_COLUMNS: Final = "key binary, value binary, partition int, timestamp timestamp_ltz"
_SIZE_ACCURACY: Final = 100


class HourStats(NamedTuple):
    """One hour of one partition. `value_p50` and `value_p99` exclude tombstones."""

    hour_ms: int
    partition: int
    records: int
    key_bytes: int
    value_bytes: int
    tombstones: int
    without_key: int
    distinct_keys_estimate: int
    value_p50: int | None
    value_p99: int | None
    value_max: int | None

    @property
    def size_bytes(self) -> int:
        return self.key_bytes + self.value_bytes


def stats(
    session: SparkSession, source: Mapping[str, str], *, progress: Progress | None = None
) -> list[HourStats]:
    """Statistics ordered by hour and partition. `source` are options of the Spark source, for one
    topic.
    """
    from pyspark.sql import functions as f

    rows = session.read.format("tierlog").schema(_COLUMNS).options(**source).load()
    hour = f.floor(f.unix_millis("timestamp") / HOUR_MS) * HOUR_MS
    value_size = f.length("value")
    grouped = rows.groupBy(hour.alias("hour_ms"), "partition").agg(
        f.count(f.lit(1)).alias("records"),
        f.coalesce(f.sum(f.length("key")), f.lit(0)).alias("key_bytes"),
        f.coalesce(f.sum(value_size), f.lit(0)).alias("value_bytes"),
        f.count_if(f.col("value").isNull()).alias("tombstones"),
        f.count_if(f.col("key").isNull()).alias("without_key"),
        f.approx_count_distinct("key").alias("distinct_keys_estimate"),
        f.percentile_approx(value_size, 0.5, _SIZE_ACCURACY).alias("value_p50"),
        f.percentile_approx(value_size, 0.99, _SIZE_ACCURACY).alias("value_p99"),
        f.max(value_size).alias("value_max"),
    )
    with progress_reported(session, progress):
        found = [HourStats(**row.asDict()) for row in grouped.collect()]
    return sorted(found)


MAX_BARS: Final = 200
WIDTH: Final = 1000
PANEL: Final = 220
LEFT: Final = 80
TOP: Final = 70
GAP: Final = 50
COLOURS: Final = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f",
)  # fmt: skip
_BAR_HOURS: Final = (1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 2160, 8760, 87_600)

Bars = Mapping[int, Mapping[int, int]]
"""Values by bar number and partition."""


class _Scale(NamedTuple):
    """`bars` bars of `bar_hours` hours each, the first at hour `first`."""

    first: int
    bar_hours: int
    bars: int

    def bar(self, row: HourStats) -> int:
        return (row.hour_ms // HOUR_MS - self.first) // self.bar_hours

    def start(self, bar: int) -> str:
        """A bar's start time; in seconds if a timestamp is outside the calendar's range."""
        seconds = (self.first + bar * self.bar_hours) * HOUR_MS // 1000
        try:
            return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
        except (OverflowError, ValueError, OSError):
            return f"{seconds} s"


def chart_svg(rows: Sequence[HourStats], *, title: str) -> str:
    """An SVG document."""
    height = TOP + 2 * PANEL + GAP + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 24, title, size=18),
    ]
    if rows:
        parts += _drawn(rows)
    else:
        parts.append(_text(LEFT, TOP + 40, "no records", size=14))
    return "\n".join([*parts, "</svg>", ""])


def _drawn(rows: Sequence[HourStats]) -> list[str]:
    scale = _scale(rows)
    partitions = sorted({row.partition for row in rows})
    stacked = len(partitions) <= len(COLOURS)
    colours = {
        number: COLOURS[at] if stacked else COLOURS[0] for at, number in enumerate(partitions)
    }
    unit = "an hour" if scale.bar_hours == 1 else f"{scale.bar_hours} hours"
    parts = [_text(LEFT, 46, f"{_span(scale)} UTC, one bar is {unit}", colour="#666666")]
    if stacked:
        parts += _legend(colours)
    panels: tuple[tuple[str, Callable[[HourStats], int]], ...] = (
        ("records", lambda row: row.records),
        ("bytes of keys and values", lambda row: row.size_bytes),
    )
    for at, (name, measure) in enumerate(panels):
        bars = _summed(rows, scale, measure)
        parts += _panel(name, bars, scale, colours, top=TOP + at * (PANEL + GAP))
    return parts


def _scale(rows: Sequence[HourStats]) -> _Scale:
    hours = [row.hour_ms // HOUR_MS for row in rows]
    first, last = min(hours), max(hours)

    def bars(width: int) -> int:
        return last // width - first // width + 1

    # Bars begin at multiples of their width, so one more than the hours would fill may be needed.
    widest = -(-(last - first) // (MAX_BARS - 1))
    width = next((one for one in _BAR_HOURS if bars(one) <= MAX_BARS), widest)
    return _Scale(first // width * width, width, bars(width))


def _summed(rows: Sequence[HourStats], scale: _Scale, measure: Callable[[HourStats], int]) -> Bars:
    bars: dict[int, dict[int, int]] = {}
    for row in rows:
        bar = bars.setdefault(scale.bar(row), {})
        bar[row.partition] = bar.get(row.partition, 0) + measure(row)
    return bars


def _panel(
    name: str, bars: Bars, scale: _Scale, colours: Mapping[int, str], *, top: int
) -> list[str]:
    highest = max(1, *(sum(bar.values()) for bar in bars.values()))
    bottom, width = top + PANEL, (WIDTH - LEFT - 20) / scale.bars
    parts = [_text(LEFT, top - 8, name, colour="#333333")]
    for share in (0, 0.5, 1):
        y = bottom - share * (PANEL - 20)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, _short(highest * share), anchor="end"))
    for number, bar in sorted(bars.items()):
        y = float(bottom)
        for partition, amount in sorted(bar.items()):
            height = amount / highest * (PANEL - 20)
            y -= height
            parts.append(
                f'<rect x="{LEFT + number * width:.2f}" y="{y:.2f}" '
                f'width="{max(0.5, width - (width > 4)):.2f}" height="{height:.2f}" '
                f'fill="{colours[partition]}"/>'
            )
    for number in sorted({0, scale.bars // 2, scale.bars - 1}):
        anchor = "start" if number == 0 else "end" if number == scale.bars - 1 else "middle"
        parts.append(
            _text(LEFT + (number + 0.5) * width, bottom + 16, scale.start(number), anchor=anchor)
        )
    return parts


def _legend(colours: Mapping[int, str]) -> list[str]:
    parts: list[str] = []
    for at, (partition, colour) in enumerate(colours.items()):
        x = WIDTH - 20 - (len(colours) - at) * 40
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 16, 24, str(partition)))
    return parts


def _span(scale: _Scale) -> str:
    return f"{scale.start(0)} to {scale.start(scale.bars)}"


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000 or unit == "T":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value >= 10 or not unit else f"{value:.1f}{unit}"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    colour: str = "#222222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
