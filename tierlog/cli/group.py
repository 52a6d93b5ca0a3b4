"""`tierlog group`: list, describe, set and delete the offsets of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tierlog.cli.options import OutputOption, YesOption, client_command, complete_group, confirm
from tierlog.cli.output import Output, note, print_json

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.group_calls import OffsetCommit
    from tierlog.client.responses import GroupMember

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[
    str, typer.Argument(metavar="GROUP", help="The group.", autocompletion=complete_group)
]
OffsetArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="TOPIC:PARTITION=OFFSET",
        help="OFFSET is a number, earliest or latest. May be repeated.",
    ),
]


@app.command("list")
@client_command
def list_groups(client: Client, output: OutputOption = Output.AUTO) -> None:
    """List the groups by name."""
    groups = client.groups()
    columns = ("group", "type", "state", "members", "topics", "partitions", "lag")
    rows = [
        (
            one.group,
            one.type,
            one.state,
            one.members,
            ", ".join(one.topics),
            one.partitions,
            one.lag,
        )
        for one in groups
    ]
    output.table({"groups": groups}, columns, rows)


@app.command("describe")
@client_command
def describe(
    client: Client,
    group: Name,
    members: Annotated[
        bool, typer.Option("--members", help="Show who is in it, and what each reads.")
    ] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Show a group's type, state, and committed offset and lag in each partition.

    Of a share group the start offset: where what it has not done with begins.
    """
    found = client.group(group)
    title = f"{group}: {found.type}, {found.state}, generation {found.generation}"
    if members:
        output.table(found, _MEMBER_COLUMNS, list(map(_member_row, found.members)), title=title)
        return
    begins = "start offset" if found.type == "share" else "offset"  # as Kafka's tools have it
    columns = ("topic", "partition", begins, "log end", "lag", "metadata")
    rows = [
        (one.topic, one.partition, one.offset, one.log_end_offset, one.lag, one.metadata)
        for one in found.offsets
    ]
    output.table(found, columns, rows, title=title)


_MEMBER_COLUMNS = ("member", "instance", "client", "host", "partitions")


def _member_row(member: GroupMember) -> tuple[str, ...]:
    reads = [f"{row.topic}-{one}" for row in member.assignment for one in row.partitions]
    of = (member.member_id, member.instance_id or "", member.client_id, member.client_host)
    return (*of, ", ".join(reads))


@app.command("set")
@client_command
def set_offsets(
    client: Client, group: Name, arguments: OffsetArguments, output: OutputOption = Output.AUTO
) -> None:
    """Set a group's offsets; creates the group if it does not exist."""
    offsets = [parse_offset(client, argument) for argument in arguments]
    client.commit_offsets(group, offsets)
    if output.is_json:
        print_json(client.group(group))
        return
    for one in offsets:
        note(f"{group} reads {one.topic}-{one.partition} from {one.offset}")


@app.command("delete")
@client_command
def delete(
    client: Client,
    group: Name,
    yes: YesOption = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Delete all of a group's offsets."""
    confirm(f"this deletes the committed offsets of {group}", yes=yes)
    client.delete_group(group)
    output.report({"deleted": group}, f"deleted {group}")


def parse_offset(client: Client, text: str) -> OffsetCommit:
    """Parse `TOPIC:PARTITION=OFFSET`; a keyword becomes its current offset. An offset outside the
    log becomes its start or end, with a note, as in kafka-consumer-groups.
    """
    from tierlog.client.group_calls import OffsetCommit

    place, separator, offset = text.partition("=")
    topic, colon, partition = place.rpartition(":")
    if not (topic and colon and separator) or not _is_number(partition):
        raise typer.BadParameter(f"expected TOPIC:PARTITION=OFFSET, not {text!r}")
    number = int(partition)
    if not _is_number(offset) and offset not in ("earliest", "latest"):
        raise typer.BadParameter(f"an offset must be a number, earliest or latest, not {offset!r}")
    now = client.offsets(topic, number)
    start, end = now.log_start_offset, now.high_watermark
    wanted = int(offset) if _is_number(offset) else {"earliest": start, "latest": end}[offset]
    found = min(max(wanted, start), end)
    if found != wanted:
        note(f"{topic}-{number} has offsets {start} to {end}: {wanted} becomes {found}")
    return OffsetCommit(topic, number, found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19
