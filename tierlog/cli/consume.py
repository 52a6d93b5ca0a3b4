"""`tierlog consume`: print records, one per line, from either tier."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import islice
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli import record_lines
from tierlog.cli.options import TopicArgument, client_command, complete_group
from tierlog.cli.output import for_stdout
from tierlog.cli.record_range import LAST_MAX, Range, Reader, parse_filter, parse_range
from tierlog.client.wire import Isolation
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.batch_runs import headers_in_order

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.records import ConsumedRecord
    from tierlog.client.responses import FetchedBatches
    from tierlog.client.wire import Limits

MAX_FETCH_BYTES = 4 << 20


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
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since",
        "--timestamp",
        metavar="TIME",
        help="Start at this time: 1h (ago), 2026-02-01T12:00 (UTC), RFC 3339 or milliseconds.",
    ),
]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="OFFSET|TIME", help="Stop before this offset, or before the first record at a time."
    ),
]
LastOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=LAST_MAX, help="Only the last records: of all partitions, by timestamp."
    ),
]
KeyOption = Annotated[str | None, typer.Option(help="Only records with this key.")]
GrepOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN", help="Only records whose value has this; a regular expression."
    ),
]
ShowOption = Annotated[
    str | None,
    typer.Option(
        metavar="FIELDS",
        help="Before the value, between tabs: any of "
        + ",".join(name for name in record_lines.FIELDS if name != "value")
        + ".",
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help=r"As kcat's -f: %s value, %k key, %o offset, %p partition, %T time, %h headers, \n.",
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        help="Read as a member of this group, which divides the partitions among its members (not "
        "with --partition); continue from its last commit, and commit what was printed.",
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
DecodeOption = Annotated[
    bool | None,
    typer.Option(
        "--decode/--raw",
        help="Values, and keys if the subject TOPIC-key has schemas, as JSON, by the schemas whose "
        "ids they begin with, or as they are; by default "
        "decoded if the topic's schema.validation says that they have one.",
        show_default=False,
    ),
]
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
    since: SinceOption = None,
    until: UntilOption = None,
    last: LastOption = None,
    key: KeyOption = None,
    grep: GrepOption = None,
    group: GroupOption = None,
    max_records: MaxRecordsOption = None,
    isolation: IsolationOption = "read_uncommitted",
    follow: FollowOption = False,
    show: ShowOption = None,
    template: TemplateOption = None,
    format_: FormatOption = Format.VALUE,
    decode: DecodeOption = None,
) -> None:
    """Print records; stops at the high watermark unless --follow is given."""
    from tierlog.client.wire import Limits

    wanted = parse_range(offset=offset, since=since, until=until, last=last, now_ms=wall_clock_ms())
    wanted_key = None if key is None else key.encode(errors="surrogateescape")
    limits = Limits(max_bytes=MAX_FETCH_BYTES, isolation=isolation, key=wanted_key)
    parts = _parts(format_, show, template)
    matches = parse_filter(grep)
    if parts is None:
        _check_batches(
            {
                "--follow": follow or None,
                "--group": group,
                "--max-records": max_records,
                "--until": until,
                "--last": last,
                "--key": key,
                "--grep": grep,
                "--decode": decode or None,
            }
        )
        _batches(client, topic, partition, start=wanted, limits=limits)
        return
    _check_options(wanted, group=group, follow=follow)
    decoded = _decoder(client, topic, decode)
    if decoded is not None and matches is not None:
        matches = partial(_matches_decoded, decoded, matches)
    reader = Reader(client, topic, partition, limits, group=group, matches=matches)
    records: Iterable[ConsumedRecord] = reader.read_range(wanted, follow=follow)
    if decoded is not None:
        records = map(decoded, records)
    if follow:
        watch = partial(_exit_when_output_closes, client)
        Thread(target=watch, name="output-watch", daemon=True).start()
    flush = follow or group is not None  # records are printed before they are committed
    to_line = record_lines.line_of(parts, for_stdout())
    count, printed = _print(islice(records, max_records), to_line, flush=flush)
    if group is not None and printed is not None and count == max_records:
        client.commit_consumed(printed)  # it would count when the next one is asked for


def _decoder(
    client: Client, topic: str, decode: bool | None
) -> Callable[[ConsumedRecord], ConsumedRecord] | None:
    """None: keys and values are printed as they are."""
    if decode is None:
        config = client.describe_topic(topic).config
        decode = config.get("schema.validation", "none") != "none"
    if not decode:
        return None
    from tierlog.cli.decoded_values import ShownRecords  # it takes a third of a second to import

    return ShownRecords(client, topic)


def _matches_decoded(
    decoded: Callable[[ConsumedRecord], ConsumedRecord],
    matches: Callable[[ConsumedRecord], bool],
    record: ConsumedRecord,
) -> bool:
    return matches(decoded(record))


def _parts(
    format_: Format, show: str | None, template: str | None
) -> Sequence[record_lines.Part] | None:
    """What is printed of a record; None for whole batches. Raises BadParameter."""
    if (show is not None) + (template is not None) + (format_ is not Format.VALUE) > 1:
        raise typer.BadParameter("give one of --show, --template and --format")
    if template is not None:
        return record_lines.parse_template(template)
    if show is not None:
        return record_lines.shown_fields(show)
    return {Format.VALUE: record_lines.VALUE_LINE, Format.JSON: record_lines.JSON_LINE}.get(format_)


def _check_batches(options: Mapping[str, object]) -> None:
    """Raises BadParameter."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(
            "--format batches copies whole batches up to the high watermark: it does not go with "
            + " or ".join(given)
        )


def _check_options(wanted: Range, *, group: str | None, follow: bool) -> None:
    """Raises BadParameter."""
    if group is not None and (wanted.timestamp is not None or wanted.last is not None):
        raise typer.BadParameter(
            "--group continues from its commits: it does not go with --since or --last"
        )
    if follow and wanted.has_end:
        raise typer.BadParameter("--follow never ends: it does not go with --until")


def _print(
    records: Iterable[ConsumedRecord], to_line: Callable[[ConsumedRecord], bytes], *, flush: bool
) -> tuple[int, ConsumedRecord | None]:
    """Print the records; return their number and the last one."""
    out = sys.stdout.buffer
    count, record = 0, None
    for record in records:
        out.write(to_line(record))
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


def _batches(
    client: Client,
    topic: str,
    partition: int | None,
    *,
    start: Range,
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
    offset, timestamp = start.offset, start.timestamp
    at_end, end = False, None
    while not at_end:
        page = client.fetch_batches(
            topic, partition, offset=offset, timestamp=timestamp, limits=limits
        )
        if end is None and page.is_end_known:
            end = page.high_watermark
        sys.stdout.buffer.write(page.batches if end is None else _batches_before(end, page))
        has_ended = end is not None and page.next_offset >= end
        at_end = page.up_to_date or page.next_offset == offset or has_ended
        offset, timestamp = page.next_offset, None
    sys.stdout.buffer.flush()


def _batches_before(end: int, page: FetchedBatches) -> bytes:
    """The page without the batches that were appended later."""
    if page.next_offset <= end:
        return page.batches
    headers = headers_in_order(page.batches, from_offset=0, next_offset=page.next_offset)
    kept = sum(header.size_bytes for header in headers if header.next_offset <= end)
    return page.batches[:kept]
