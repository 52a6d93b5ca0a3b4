"""`tierlog consume`: print records, one per line, from either tier."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import islice
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from tierlog.cli.options import TopicArgument, client_command, complete_group
from tierlog.cli.output import for_stdout
from tierlog.client.records import json_member, to_ms
from tierlog.client.wire import Isolation
from tierlog.record_format.batch_runs import headers_in_order
from tierlog.record_format.errors import InvalidRequest

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.records import ConsumedRecord
    from tierlog.client.responses import FetchedBatches
    from tierlog.client.wire import Limits

MAX_FETCH_BYTES = 4 << 20
_BATCHES_ALONE = (
    "--format batches reads up to the high watermark: it does not go with --follow, --max-records "
    "or --group"
)


class Format(StrEnum):
    """What is printed of a record."""

    VALUE = "value"
    JSON = "json"
    BATCHES = "batches"


PartitionOption = Annotated[
    int | None,
    typer.Option(
        "--partition", "-p", min=0, help="One partition; by default all, one after another."
    ),
]
OffsetOption = Annotated[
    str | None,
    typer.Option(metavar="OFFSET", help="An offset, earliest (default), latest or earliest-local."),
]
TimestampOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Start at this time instead: milliseconds, or RFC 3339."),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        help="Continue from this group's last commit, and commit what was printed.",
        autocompletion=complete_group,
    ),
]
MaxRecordsOption = Annotated[
    int | None,
    typer.Option(
        "--max-records", "-n", min=0, max=sys.maxsize, help="Stop after this many records."
    ),
]
IsolationOption = Annotated[
    Isolation,
    typer.Option(help="read_committed skips records of aborted and of open transactions."),
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Keep waiting for new records.")]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="value: one per line; json: one object per line; batches: Kafka's record batches.",
    ),
]


@client_command
def consume(
    client: Client,
    topic: TopicArgument,
    *,
    partition: PartitionOption = None,
    offset: OffsetOption = None,
    timestamp: TimestampOption = None,
    group: GroupOption = None,
    max_records: MaxRecordsOption = None,
    isolation: IsolationOption = "read_uncommitted",
    follow: FollowOption = False,
    format_: FormatOption = Format.VALUE,
) -> None:
    """Print records; stops at the high watermark unless --follow is given."""
    from tierlog.client.wire import Limits

    start = _start(offset, timestamp, group)
    limits = Limits(max_bytes=MAX_FETCH_BYTES, isolation=isolation)
    if format_ is Format.BATCHES:
        if follow or max_records is not None or group is not None:
            raise typer.BadParameter(_BATCHES_ALONE)
        _batches(client, topic, partition, start=start, limits=limits)
        return
    topic_id = client.describe_topic(topic).topic_id if group and max_records else None
    records = client.consume(
        topic,
        partitions=None if partition is None else [partition],
        offset=start.offset,
        timestamp=start.timestamp,
        group=group,
        follow=follow,
        limits=limits,
    )
    if follow:
        watch = partial(_exit_when_output_closes, client)
        Thread(target=watch, name="output-watch", daemon=True).start()
    flush = follow or group is not None  # records are printed before they are committed
    to_line = _value if format_ is Format.VALUE else _json
    try:
        count, last = _print(islice(records, max_records), to_line, flush=flush)
    except KeyboardInterrupt:
        if follow:
            return  # the usual end
        raise
    if group is not None and last is not None and count == max_records:
        records.close()
        _commit_last(client, group, last, topic_id=topic_id)


class _Start(NamedTuple):
    """Where reading starts; `timestamp`, in milliseconds, instead of `offset`."""

    offset: Any
    timestamp: int | None


def _start(offset: str | None, timestamp: str | None, group: str | None) -> _Start:
    """Raises BadParameter."""
    if offset is not None and timestamp is not None:
        raise typer.BadParameter("give either --offset or --timestamp")
    if group is not None and timestamp is not None:
        raise typer.BadParameter(
            "--group continues from its commits: it does not go with --timestamp"
        )
    return _Start(parse_offset(offset or "earliest"), _parse_time(timestamp))


def _commit_last(client: Client, group: str, last: ConsumedRecord, *, topic_id: str | None) -> None:
    """Commit the last record: it counts as consumed when the next one is requested, which does not
    happen with --max-records.
    """
    from tierlog.client.group_calls import OffsetCommit

    commit = OffsetCommit(last.topic, last.partition, last.offset + 1, topic_id=topic_id)
    client.commit_offsets(group, [commit])


def parse_offset(text: str) -> Any:
    """A number or a keyword. Raises BadParameter."""
    if text in {"earliest", "latest", "earliest-local"}:
        return text
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise typer.BadParameter(
            f"--offset must be a number, earliest, latest or earliest-local, not {text!r}"
        )
    return int(text)


def _parse_time(text: str | None) -> int | None:
    """Milliseconds. Raises BadParameter."""
    try:
        return to_ms(text)
    except InvalidRequest as error:
        raise typer.BadParameter(f"--timestamp: {error}") from error


def _print(
    records: Iterator[ConsumedRecord], to_line: Callable[[ConsumedRecord], bytes], *, flush: bool
) -> tuple[int, ConsumedRecord | None]:
    """Print the records; return their number and the last one."""
    out, safe = sys.stdout.buffer, for_stdout()
    count, record = 0, None
    for record in records:
        out.write(safe(to_line(record)) + b"\n")
        count += 1
        if flush:
            out.flush()
    out.flush()
    return count, record


def _exit_when_output_closes(client: Client) -> None:
    """Exit when the reader of a pipe, such as `head`, has ended: a write would fail, but there may
    be nothing to write for days. Like `tail -f`, watch the pipe.
    """
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)  # POLLERR and POLLHUP are always reported
    # POLLNVAL is ignored: it says nothing about a reader.
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in watched.poll()):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the main thread may fail on the way
            client.close()  # commits what was printed for a group
        finally:
            os._exit(0)  # an interrupt of the main thread might wait for a long poll


def _value(record: ConsumedRecord) -> bytes:
    return record.value or b""


def _json(record: ConsumedRecord) -> bytes:
    return msgspec.json.encode(
        {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp,
            **json_member("key", record.key),
            **json_member("value", record.value),
            "headers": [
                {"name": name, **json_member("value", content)} for name, content in record.headers
            ],
        }
    )


def _batches(
    client: Client,
    topic: str,
    partition: int | None,
    *,
    start: _Start,
    limits: Limits,
) -> None:
    """Write whole batches as stored, up to what was the high watermark or the last stable offset
    when it began.
    """
    if partition is None:
        raise typer.BadParameter("--format batches requires --partition N")
    if sys.stdout.isatty():
        raise typer.BadParameter(
            "--format batches cannot be printed on a terminal: redirect it to a file or a pipe"
        )
    offset, timestamp = start
    at_end, end = False, None
    while not at_end:
        page = client.fetch_batches(
            topic, partition, offset=offset, timestamp=timestamp, limits=limits
        )
        end = page.high_watermark if end is None else end
        sys.stdout.buffer.write(_batches_before(end, page))
        at_end = page.up_to_date or page.next_offset == offset or page.next_offset >= end
        offset, timestamp = page.next_offset, None
    sys.stdout.buffer.flush()


def _batches_before(end: int, page: FetchedBatches) -> bytes:
    """The page without the batches that were appended later."""
    if page.next_offset <= end:
        return page.batches
    headers = headers_in_order(page.batches, from_offset=0, next_offset=page.next_offset)
    kept = sum(header.size_bytes for header in headers if header.next_offset <= end)
    return page.batches[:kept]
