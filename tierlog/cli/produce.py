"""`tierlog produce`: send a pipe or a file to a topic.

* Once the broker has accepted a request, the command waits while the broker restarts. If it fails
  during a request, the command ends with the number of records that were appended, so that none is
  sent twice.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import typer

from tierlog.cli.options import OutputOption, TopicArgument, client_command
from tierlog.cli.output import Output, note, print_json, record_counter, warn
from tierlog.cli.produce_input import (
    Columns,
    Format,
    Item,
    LiveInput,
    RequestBatcher,
    csv_rows,
    format_of,
    full_lines,
    json_key,
    lines,
    ndjson,
    parquet_rows,
    plain_key,
)
from tierlog.client.wire import NDJSON, Acks

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import ProduceResponse, ProduceResult

MAX_REQUEST_BYTES = 1 << 20
MAX_BATCHES_BYTES = 16 << 20
_WARNINGS: Final = {  # with what to type
    "older-than-retention": "all records of a request have timestamps older than {topic}'s "
    "retention.ms, so the next check, within a minute, may delete them; to keep them: "
    "tierlog topic alter {topic} --config retention.ms=unlimited",
}

File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="The input file; standard input by default."),
]
FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="Format of the input; by default from the file's suffix, else lines.",
        show_default=False,
    ),
]
Partition = Annotated[
    int | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        help="Partition of all records; by default chosen by key, or in turn.",
    ),
]
KeySeparator = Annotated[
    str | None,
    typer.Option(metavar="S", help="For lines: the key is the text before this separator."),
]
KeyColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="For csv and parquet: the column that is also the key."),
]
Delimiter = Annotated[
    str, typer.Option(metavar="C", help=r"For csv: the character between cells; \t is a tab.")
]
ValueSchema = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        help="Have the broker encode the values, which are JSON, by a schema of the subject "
        "TOPIC-value: latest, a version's number, or id: and an id.",
    ),
]
KeySchema = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        help="As --value-schema, for keys, which are JSON too, by a schema of the subject "
        "TOPIC-key. A cell of --key-column is taken as the JSON of its value.",
    ),
]
AcksOption = Annotated[Acks, typer.Option(help="0 (not confirmed), 1 (written) or all (flushed).")]
BatchRecords = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Maximum number of records per request.")
]


@client_command
def produce(
    client: Client,
    topic: TopicArgument,
    file: File = None,
    *,
    format_: FormatOption = None,
    partition: Partition = None,
    key_separator: KeySeparator = None,
    key_column: KeyColumn = None,
    delimiter: Delimiter = ",",
    key_schema: KeySchema = None,
    value_schema: ValueSchema = None,
    acks: AcksOption = "all",
    batch_records: BatchRecords = 10_000,
    output: OutputOption = Output.AUTO,
) -> None:
    """Append records from a file or a pipe.

    Formats: lines, one value per line; ndjson, one JSON value per line; envelope, one object per
    line with value and, optionally, key, headers, timestamp and partition; csv and parquet, one
    JSON object per row; batches, Kafka's record batches unchanged.
    """
    file = None if str(file) == "-" else file  # the usual name of standard input
    schemas = _Schemas(key_schema, value_schema)
    kind = _checked_format(format_, file, schemas, separated=key_separator is not None)
    key = _key_source(kind, separator=key_separator, column=key_column)
    if key_schema is not None and key is None and kind is not Format.ENVELOPE:
        raise typer.BadParameter(
            "--key-schema requires keys: --key-separator, --key-column, or --format envelope"
        )
    delimiter = _checked_delimiter(kind, delimiter)
    as_key = json_key if key_schema is not None else plain_key
    target = _Target(client, topic, partition, acks, schemas)
    send = target.append_envelopes if kind is Format.ENVELOPE else target.append_records
    batcher = RequestBatcher(send, max_records=batch_records, max_bytes=MAX_REQUEST_BYTES)
    with (
        target.summary.reported_on_failure(),
        _shown_progress(target, file),
        _opened(file, batcher) as source,
    ):
        if kind is Format.BATCHES:
            target.append_batches(source)
        else:
            columns = Columns(key, as_key, delimiter)
            for number, item in _read_items(kind, source, file, columns):
                batcher.add_item(number, item)
            batcher.send_items()
    if not target.summary.records:
        client.describe_topic(topic)  # a wrong name is an error even if the input is empty
    target.summary.report(as_json=output.is_json)


class _Schemas(NamedTuple):
    """By which keys and values are encoded."""

    key: str | None
    value: str | None


class _Target:
    """Where records are appended, and what was. Each method sends one request, except that
    `append_batches` reads its input to the end.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int | None,
        acks: Acks,
        schemas: _Schemas,
    ) -> None:
        from tierlog.client.problems import AppendWarning

        self._client, self._topic, self._partition, self._acks = client, topic, partition, acks
        self._schemas = schemas
        warnings.simplefilter("ignore", AppendWarning)  # the summary shows them
        self.summary = _Summary(topic)
        self.on_appended: Callable[[int], None] = lambda _: None  # given the number of records

    def append_records(self, records: list[Any]) -> None:
        self._appended(
            self._client.produce(
                self._topic,
                records,
                partition=self._partition,
                acks=self._acks,
                key_schema=self._schemas.key,
                value_schema=self._schemas.value,
            )
        )

    def append_envelopes(self, lines: list[Any]) -> None:
        from tierlog.client import calls

        call = calls.produce_body(
            self._topic,
            b"\n".join(lines),
            content_type=NDJSON,
            partition=self._partition,
            acks=self._acks,
            envelope=True,
            key_schema=self._schemas.key,
            value_schema=self._schemas.value,
        )
        self._appended(self._client.call(call))

    def append_batches(self, source: IO[bytes]) -> None:
        partition = self._partition
        if partition is None:
            raise typer.BadParameter("--format batches requires --partition N")
        for body in _whole_batches(source):
            self._appended(
                self._client.produce_batches(
                    self._topic, body, partition=partition, acks=self._acks
                )
            )

    def _appended(self, response: ProduceResponse) -> None:
        from tierlog.client.exchange import RETRY_OVER_RESTART

        self.summary.add_response(response)
        self.on_appended(self.summary.records)
        self._client.retries = RETRY_OVER_RESTART  # broker and topic exist


def _checked_format(
    given: Format | None, file: Path | None, schemas: _Schemas, *, separated: bool
) -> Format:
    """What a schema encodes is JSON. `separated`: lines are keys and values."""
    found = given or format_of(file)
    if schemas == (None, None) or (found is Format.LINES and separated):
        return found
    if given in {Format.LINES, Format.BATCHES}:
        option = "--value-schema" if schemas.value is not None else "--key-schema"
        raise typer.BadParameter(f"{option} requires JSON: --format ndjson")
    return Format.NDJSON if found is Format.LINES else found


def _key_source(kind: Format, *, separator: str | None, column: str | None) -> str | None:
    """The separator or column from which the format takes keys."""
    if separator is not None and kind is not Format.LINES:
        raise typer.BadParameter("--key-separator requires --format lines")
    if separator == "":
        raise typer.BadParameter("--key-separator must not be empty")
    if column is not None and kind not in {Format.CSV, Format.PARQUET}:
        raise typer.BadParameter("--key-column requires --format csv or parquet")
    return column if separator is None else separator


def _checked_delimiter(kind: Format, text: str) -> str:
    if text != "," and kind is not Format.CSV:
        raise typer.BadParameter("--delimiter requires --format csv")
    delimiter = "\t" if text == r"\t" else text
    if len(delimiter) != 1 or delimiter in '"\r\n':
        required = "one character, neither a quote nor a line break"
        raise typer.BadParameter(f"--delimiter must be {required}, not {text!r}")
    return delimiter


def _read_items(
    kind: Format, source: IO[bytes], file: Path | None, columns: Columns
) -> Iterator[tuple[int, Item]]:
    """The items with their numbers in the input."""
    if kind is Format.ENVELOPE:
        return full_lines(source)
    if kind is Format.LINES:
        return enumerate(lines(source, key_separator=columns.key), 1)
    if kind is Format.PARQUET:
        if file is None or not file.is_file():
            raise typer.BadParameter(
                "--format parquet needs a FILE: a pipe cannot be read from its end"
            )
        return enumerate(parquet_rows(file, columns), 1)
    if kind is Format.CSV:
        return enumerate(csv_rows(source, columns), 1)
    return enumerate(ndjson(source), 1)


@contextlib.contextmanager
def _opened(file: Path | None, batcher: RequestBatcher) -> Iterator[IO[bytes]]:
    if file is None:
        if sys.stdin.isatty():
            note("reads from the terminal; Ctrl-D ends the input")
        with io.FileIO(sys.stdin.fileno(), closefd=False) as source:
            yield io.BufferedReader(LiveInput(source, batcher))
        return
    if not sys.stderr.isatty() or not file.is_file():
        with io.BufferedReader(LiveInput(io.FileIO(file), batcher)) as source:
            yield source
        return
    from rich.console import Console
    from rich.progress import open as open_with_progress

    with open_with_progress(
        file, "rb", description=f"produce {file.name}", console=Console(stderr=True)
    ) as source:
        yield source


@contextlib.contextmanager
def _shown_progress(target: _Target, file: Path | None) -> Iterator[None]:
    """Of a pipe, whose end is not known; a file has a bar."""
    if (file is not None and file.is_file()) or (file is None and sys.stdin.isatty()):
        yield
        return
    with record_counter(f"produce {target.summary.topic}:") as target.on_appended:
        yield


def _whole_batches(source: IO[bytes]) -> Iterator[bytes]:
    """Read the input in pieces of whole batches. Raises BadParameter if the last is truncated."""
    from tierlog.record_format.batch import iter_headers, parse_header

    rest = b""
    position = 0
    while more := source.read(MAX_BATCHES_BYTES):
        rest += more
        end = max((header.end_position for header in iter_headers(rest)), default=0)
        if end:
            yield rest[:end]
        rest, position = rest[end:], position + end
    if rest:
        header = parse_header(rest)
        raise typer.BadParameter(
            f"the last batch, at byte {position}, is truncated: it has {len(rest)} of "
            f"{header.size_bytes} bytes"
        )


class _Summary:
    """The records that were appended, by partition."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.records = 0
        self.partitions: dict[int, dict[str, int]] = {}
        self.warnings: dict[str, str] = {}

    def add_response(self, response: ProduceResponse) -> None:
        self.records += response.accepted or 0
        for code in response.warnings:
            self.warnings[code] = response.warning_details.get(code, code)
        self._add_results(response.results)

    def _add_results(self, results: Iterable[ProduceResult]) -> None:
        for result in results:
            self.records += result.records
            known = self.partitions.setdefault(
                result.partition, {"base_offset": result.base_offset, "records": 0}
            )
            known["last_offset"] = result.last_offset
            known["records"] += result.records

    @contextlib.contextmanager
    def reported_on_failure(self) -> Iterator[None]:
        """On a failure, print what was appended, so that the rest can be sent again."""
        from tierlog.client.problems import AppendedInPart
        from tierlog.client.responses import ProduceResult

        try:
            yield
        except BaseException as error:
            if isinstance(error, AppendedInPart):
                self._add_results(msgspec.convert(error.results, list[ProduceResult]))
            if self.records:
                note(f"tierlog: stopped early; appended before that: {self._summary()}")
            raise

    def report(self, *, as_json: bool) -> None:
        for code, detail in sorted(self.warnings.items()):
            warn(_WARNINGS.get(code, "{detail}").format(topic=self.topic, detail=detail))
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
        note(self._summary())

    def _summary(self) -> str:
        places = ", ".join(
            f"{number}: {one['base_offset']} to {one['last_offset']}"
            for number, one in sorted(self.partitions.items())
        )
        counted = f"{self.topic}: {self.records} record{'s' * (self.records != 1)}"
        return f"{counted}{f' (partition {places})' if places else ''}"
