"""`tierlog transaction`: list, describe and abort the transactions of transactional ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tierlog.cli.options import (
    OutputOption,
    YesOption,
    client_command,
    complete_transactional_id,
    confirm,
)
from tierlog.cli.output import Output

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import TransactionDescription, TransactionListing

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The transactional id.", autocompletion=complete_transactional_id
    ),
]


@app.command("list")
@client_command
def list_transactions(
    client: Client,
    state: Annotated[
        str | None,
        typer.Option(metavar="STATE", help="Only those in this state, such as Ongoing."),
    ] = None,
    output: OutputOption = Output.AUTO,
) -> None:
    """List the transactional ids by name."""
    found = list(_all_pages(client, state))
    columns = ("id", "state", "for", "partitions", "producer", "epoch")
    rows = [
        (
            one.transactional_id,
            one.state,
            _age(one.age_ms),
            one.partitions,
            one.producer_id,
            one.producer_epoch,
        )
        for one in found
    ]
    output.table({"transactions": found}, columns, rows)


def _all_pages(client: Client, state: str | None) -> Iterator[TransactionListing]:
    after: str | None = None
    while True:
        page = client.list_transactions(state=state, after=after)
        yield from page.transactions
        after = page.next_after
        if after is None:
            return


@app.command("describe")
@client_command
def describe(client: Client, name: Name, output: OutputOption = Output.AUTO) -> None:
    """Show a transaction's partitions, and how much of each nobody can read as committed.

    The last stable offset of a partition is that of its oldest transaction in progress.
    """
    import msgspec

    found = client.describe_transaction(name)
    columns = ("topic", "partition", "last stable offset", "high watermark", "held back")
    places = [(one.topic, number) for one in found.partitions for number in one.partitions]
    rows = [_Held.of(client, *place) for place in places]
    document = {**msgspec.structs.asdict(found), "partitions": [row._asdict() for row in rows]}
    output.table(document, columns, [(*row, row.records) for row in rows], title=_title(found))


class _Held(NamedTuple):
    """What a partition holds back."""

    topic: str
    partition: int
    last_stable_offset: int
    high_watermark: int

    @classmethod
    def of(cls, client: Client, topic: str, partition: int) -> _Held:
        now = client.offsets(topic, partition)
        return cls(topic, partition, now.last_stable_offset, now.high_watermark)

    @property
    def records(self) -> int:
        return self.high_watermark - self.last_stable_offset


def _title(found: TransactionDescription) -> str:
    from tierlog.record_format.units import rough_duration

    age = f" for {_age(found.age_ms)}" if found.age_ms is not None else ""
    return (
        f"{found.transactional_id}: {found.state}{age}, aborted after "
        f"{rough_duration(found.timeout_ms)}, producer {found.producer_id} epoch "
        f"{found.producer_epoch}"
    )


def _age(age_ms: int | None) -> str:
    from tierlog.record_format.units import rough_duration

    return "" if age_ms is None else rough_duration(age_ms)


@app.command("abort")
@client_command
def abort(
    client: Client, name: Name, yes: YesOption = False, output: OutputOption = Output.AUTO
) -> None:
    """Abort an id's transaction, and fence its producer: it has to begin anew."""
    found = client.describe_transaction(name)
    confirm(f"this aborts what {name} has in progress ({found.state}), and fences it", yes=yes)
    client.begin_transactions(name, timeout_ms=found.timeout_ms)
    output.report({"fenced": name, "was": found.state}, f"{name} was {found.state}, and is fenced")
