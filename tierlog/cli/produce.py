"""`tierlog produce`: send a pipe or a file to a topic.

* Once the broker has taken something, the command waits if it restarts. If it goes down during a
  request, the command ends with the count of what was taken: no record is sent twice.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from tierlog.cli.client_options import OutputOption, TopicArgument, client_command
from tierlog.cli.gathering import Gathering, Item, LiveInput
from tierlog.cli.output import Output, note, print_json
from tierlog.cli.record_sources import (
    Format,
    csv_rows,
    format_of,
    full_lines,
    lines,
    ndjson,
    parquet_rows,
)
from tierlog.client.wire import NDJSON

if TYPE_CHECKING:
    from tierlog.client import Client
    from tierlog.client.calls import Acks
    from tierlog.client.responses import ProduceResponse

app = typer.Typer(add_completion=False)

MAX_REQUEST_BYTES = 1 << 20
MAX_BATCHES_BYTES = 16 << 20


@app.command()
@client_command
def produce(
    client: Client,
    topic: TopicArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Standard input by default.")
    ] = None,
    *,
    format_: Annotated[
        Format | None,
        typer.Option(
            "--format", help="By default, from the file's name, else lines.", show_default=False
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            help="Partition for all records; by default chosen by key, or in turn.",
        ),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="S", help="For lines: the text before it is the key.")
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For csv and parquet: the column to use as the key too."),
    ] = None,
    acks: Annotated[str, typer.Option(help="0, 1 or all.")] = "all",
    batch_records: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of records in one request.")
    ] = 10_000,
    output: OutputOption = Output.AUTO,
) -> None:
    """Append records from a file or a pipe.

    Formats: lines, one value per line; ndjson, one JSON value per line; envelope, one object per
    line with value and, optionally, key, headers, timestamp and partition; csv and parquet, one
    JSON object per row; batches, Kafka's record batches as they are.
    """
    from tierlog.client import calls
    from tierlog.client.exchange import RETRY_OVER_RESTART

    if acks not in {"0", "1", "all"}:
        raise typer.BadParameter(f"--acks is 0, 1 or all, not {acks!r}")
    wanted = cast("Acks", acks)
    kind = format_ or format_of(file)
    key = _key_of(kind, separator=key_separator, column=key_column)
    count = _Count(topic)

    def taken(answer: ProduceResponse) -> None:
        count.add(answer)
        client.retries = RETRY_OVER_RESTART  # it is there, and the topic too

    def send(items: list[Any]) -> None:
        if kind is Format.ENVELOPE:
            call = calls.produce_body(
                topic,
                b"\n".join(items),
                content_type=NDJSON,
                partition=partition,
                acks=wanted,
                envelope=True,
            )
            taken(client.call(call))
        else:
            taken(client.produce(topic, items, partition=partition, acks=wanted))

    gathering = Gathering(send, max_records=batch_records, max_bytes=MAX_REQUEST_BYTES)
    with count.told_if_it_ends_early(), _opened(file, gathering) as source:
        if kind is Format.BATCHES:
            if partition is None:
                raise typer.BadParameter("--format batches needs one partition: --partition N")
            for body in _whole_batches(source):
                taken(client.produce_batches(topic, body, partition=partition, acks=wanted))
        else:
            for number, item in _items(kind, source, file, key=key):
                gathering.add(number, item)
            gathering.send()
    if not count.records:
        client.describe_topic(topic)  # a wrong name is an error even if the input is empty
    count.report(as_json=output.is_json)


def _key_of(kind: Format, *, separator: str | None, column: str | None) -> str | None:
    """By what the format finds its keys."""
    if separator is not None and kind is not Format.LINES:
        raise typer.BadParameter("--key-separator is for lines")
    if separator == "":
        raise typer.BadParameter("--key-separator is empty: no record would have a key")
    if column is not None and kind not in {Format.CSV, Format.PARQUET}:
        raise typer.BadParameter("--key-column is for csv and parquet")
    return column if separator is None else separator


def _items(
    kind: Format, source: IO[bytes], file: Path | None, *, key: str | None
) -> Iterator[tuple[int, Item]]:
    """Items with their places in the input; `key` is from `_key_of`."""
    if kind is Format.ENVELOPE:
        return full_lines(source)
    if kind is Format.LINES:
        return enumerate(lines(source, key_separator=key), 1)
    if kind is Format.PARQUET:
        if file is None:
            raise typer.BadParameter("--format parquet needs a FILE: it is read from its end")
        return enumerate(parquet_rows(file, key_column=key), 1)
    if kind is Format.CSV:
        return enumerate(csv_rows(source, key_column=key), 1)
    return enumerate(ndjson(source), 1)


@contextlib.contextmanager
def _opened(file: Path | None, gathering: Gathering) -> Iterator[IO[bytes]]:
    if file is None or str(file) == "-":
        with io.FileIO(sys.stdin.fileno(), closefd=False) as source:
            yield io.BufferedReader(LiveInput(source, gathering))
        return
    if not sys.stderr.isatty() or not file.is_file():
        with io.BufferedReader(LiveInput(io.FileIO(file), gathering)) as source:
            yield source
        return
    from rich.console import Console
    from rich.progress import open as open_with_progress

    with open_with_progress(
        file, "rb", description=f"produce {file.name}", console=Console(stderr=True)
    ) as source:
        yield source


def _whole_batches(source: IO[bytes]) -> Iterator[bytes]:
    """The input in runs of whole batches. Raises CorruptBatch if the end is truncated."""
    from record_format.batch import iter_headers, parse_header

    held = b""
    position = 0
    while more := source.read(MAX_BATCHES_BYTES):
        held += more
        end = max((header.end_position for header in iter_headers(held)), default=0)
        if end:
            yield held[:end]
        held, position = held[end:], position + end
    if held:
        header = parse_header(held)
        raise typer.BadParameter(
            f"the last batch, at byte {position}, takes {header.size_bytes} bytes; "
            f"{len(held)} are there"
        )


class _Count:
    """What was taken, by partition."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.partitions: dict[int, dict[str, int]] = {}
        self.warnings: set[str] = set()

    def add(self, answer: ProduceResponse) -> None:
        self.records += answer.accepted or 0
        self.warnings.update(answer.warnings)
        for result in answer.results:
            self.records += result.records
            known = self.partitions.setdefault(
                result.partition, {"base_offset": result.base_offset, "records": 0}
            )
            known["last_offset"] = result.last_offset
            known["records"] += result.records

    @contextlib.contextmanager
    def told_if_it_ends_early(self) -> Iterator[None]:
        """Say how much was taken, for whoever sends the rest again."""
        try:
            yield
        except BaseException:
            if self.records:
                note(f"tierlog: stopped early; before that {self._summary()}")
            raise

    def report(self, *, as_json: bool) -> None:
        partitions = [{"partition": one, **self.partitions[one]} for one in sorted(self.partitions)]
        if as_json:
            print_json(
                {
                    "topic": self.topic,
                    "records": self.records,
                    "partitions": partitions,
                    "warnings": sorted(self.warnings),
                }
            )
            return
        for warning in sorted(self.warnings):
            note(f"warning: {warning}")
        note(self._summary())

    def _summary(self) -> str:
        places = ", ".join(
            f"{number}: {one['base_offset']} to {one['last_offset']}"
            for number, one in sorted(self.partitions.items())
        )
        return f"{self.topic}: {self.records} records{f' (partition {places})' if places else ''}"
