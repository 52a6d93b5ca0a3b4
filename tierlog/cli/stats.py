"""`tierlog stats`: a topic's contents by hour and partition, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.client_options import OutputOption, TopicArgument
from tierlog.cli.option_groups import takes
from tierlog.cli.output import Output, format_size, format_time, note, print_json
from tierlog.cli.spark_options import SourceOptions, job, task_bar
from tierlog.cli.table import print_table

if TYPE_CHECKING:
    from tierlog.spark_reader.jobs.stats import HourStats

app = typer.Typer(add_completion=False)

MAX_ROWS = 48


@app.command()
@takes(SourceOptions)
def stats(
    source: SourceOptions,
    topic: TopicArgument,
    *,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw a picture, as an SVG file.")
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """Count records, bytes, keys and sizes by hour (of record timestamps) and partition."""
    from tierlog.spark_reader.jobs.stats import stats as run_stats
    from tierlog.spark_reader.jobs.stats_chart import chart_svg

    options = source.of(topic)
    with (
        job("tierlog stats", master=source.master, conf=source.conf) as session,
        task_bar(f"stats {topic}") as progress,
    ):
        rows = run_stats(session, options, progress=progress)
    if output.is_json:
        print_json({"topic": topic, "hours": [row._asdict() for row in rows]})
    else:
        _print(topic, rows)
    if picture is not None:
        picture.write_text(chart_svg(rows, title=f"Topic {topic}"))
        note(f"picture written to {picture}")


def _print(topic: str, rows: list[HourStats]) -> None:
    columns = ("hour", "partition", "records", "bytes", "tombstones", "keys, about")
    sizes = ("value p50, about", "p99, about", "largest")
    cells = [
        (
            format_time(row.hour_ms),
            row.partition,
            row.records,
            format_size(row.size_bytes),
            row.tombstones,
            row.distinct_keys_estimate,
            format_size(row.value_p50),
            format_size(row.value_p99),
            format_size(row.value_max),
        )
        for row in rows
    ]
    left_out = len(cells) - MAX_ROWS
    caption = (
        f"{left_out} earlier rows are not shown: --output json prints all" if left_out > 0 else ""
    )
    print_table(topic, columns + sizes, cells[-MAX_ROWS:], caption=caption)
    records, total = sum(row.records for row in rows), sum(row.size_bytes for row in rows)
    note(f"{topic}: {records:,} records, {format_size(total)} of keys and values")
