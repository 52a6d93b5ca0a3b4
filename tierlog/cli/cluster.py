"""`tierlog cluster`: the brokers, and moving what they lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.options import OutputOption, YesOption, client_command, confirm
from tierlog.cli.output import Output, note, progress_bar
from tierlog.record_format.errors import RequestError
from tierlog.settings import DEFAULT_PORT, KAFKA_PORT

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.responses import Broker, ClusterDescription, Move, Reassignment

app = typer.Typer(no_args_is_help=True, add_completion=False)
LOOK_S: Final = 0.5

Node = Annotated[int, typer.Argument(metavar="NODE", min=0, help="The broker's node id.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")]


@app.command("brokers")
@client_command
def brokers(client: Client, output: OutputOption = Output.AUTO) -> None:
    """List the brokers, and how many partitions each leads and has."""
    cluster = client.describe_cluster()
    output.table(cluster, BROKER_COLUMNS, map(broker_row, cluster.brokers))
    for count, what in (
        (cluster.offline_partitions, "no leader"),
        (cluster.under_replicated_partitions, "fewer replicas in sync than they have"),
        (cluster.under_min_isr_partitions, "too few replicas in sync for a write with acks=all"),
    ):
        if count:
            note(f"{count} partition{'s have' if count > 1 else ' has'} {what}")


BROKER_COLUMNS: Final = ("node", "url", "kafka", "state", "alive", "leads", "replicas")


def broker_row(one: Broker) -> tuple[object, ...]:
    alive = "yes" if one.is_alive else "no"
    return (one.node_id, one.url, one.kafka or None, one.state, alive, one.leads, one.replicas)


@app.command("move")
@client_command
def move(
    client: Client,
    place: Annotated[
        str, typer.Argument(metavar="TOPIC:PARTITION", help="What is to be led by another broker.")
    ],
    to: Annotated[int, typer.Option("--to", metavar="NODE", min=0, help="Node id of that broker.")],
    output: OutputOption = Output.AUTO,
) -> None:
    """Hand a partition over to another broker."""
    topic, number = _parsed(place)
    moved = client.move_leader(topic, number, node_id=to)
    output.report(
        moved, f"broker {to} leads {place}; appends were refused for {moved.paused_ms} ms"
    )


def _parsed(place: str) -> tuple[str, int]:
    topic, _, number = place.rpartition(":")
    if not topic or not (number.isascii() and number.isdecimal()):
        raise typer.BadParameter(f"expected TOPIC:PARTITION, as in flights:0, not {place!r}")
    return topic, int(number)


@app.command("reassign")
@client_command
def reassign(
    client: Client,
    place: Annotated[
        str, typer.Argument(metavar="TOPIC:PARTITION", help="Whose replicas are to be elsewhere.")
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="NODE,...", help="Node ids; the first is to lead."),
    ] = None,
    *,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End one that goes on: back to what there was.")
    ] = False,
    output: OutputOption = Output.AUTO,
) -> None:
    """Have other brokers have a partition's replicas, and wait until they have.

    It goes on without this command, whoever leads: `tierlog cluster reassignments` shows it.
    """
    topic, number = _parsed(place)
    if (to is None) is not cancel:
        raise typer.BadParameter("give --to or --cancel, and not both")
    if to is None:
        now = client.cancel_reassignment(topic, number)
    else:
        now = client.reassign(topic, number, _node_ids(to))
    if now.adding or now.removing:
        with progress_bar(f"reassigning {place}", total=None):
            while any((one.topic, one.partition) == (topic, number) for one in _ongoing(client)):
                time.sleep(LOOK_S)
    nodes = [one for one in now.replicas if one not in now.removing]
    ids = ", ".join(map(str, nodes))
    output.report({"replicas": nodes}, f"the replicas of {place} are on {ids}")


def _node_ids(given: str) -> list[int]:
    if not all(one.isascii() and one.isdecimal() for one in given.split(",")):
        raise typer.BadParameter(f"--to: expected node ids, as in 2,0, not {given!r}")
    return [int(one) for one in given.split(",")]


def _ongoing(client: Client) -> tuple[Reassignment, ...]:
    return client.list_reassignments().reassignments


@app.command("reassignments")
@client_command
def reassignments(client: Client, output: OutputOption = Output.AUTO) -> None:
    """List the partitions whose replicas are being changed."""
    found = _ongoing(client)
    if not found and not output.is_json:
        note("no partition is being reassigned")
        return
    rows = [
        (f"{one.topic}:{one.partition}", *map(_nodes, (one.replicas, one.adding, one.removing)))
        for one in found
    ]
    columns = ("partition", "replicas", "adding", "removing")
    output.table({"reassignments": found}, columns, rows)


def _nodes(node_ids: Iterable[int]) -> str:
    return ",".join(map(str, node_ids))


@app.command("rebalance")
@client_command
def rebalance(
    client: Client, *, dry_run: DryRun = False, output: OutputOption = Output.AUTO
) -> None:
    """Move partitions until no broker leads two more than another, or has two replicas more.

    Replicas go on being copied afterwards: `tierlog cluster reassignments` shows which.
    """
    if dry_run:
        _print_moves(client.rebalance(dry_run=True).moves, output)
        return
    made: list[Move] = []
    with progress_bar("moving") as update:
        while True:
            now = client.rebalance()
            made += now.moves
            update(completed=len(made), total=len(made) + now.left)
            if not now.left:
                break
    _print_moves(made, output)


def _print_moves(moves: Iterable[Move], output: Output) -> None:
    made = list(moves)
    if not made and not output.is_json:
        note("nothing to move: no broker leads two partitions more than another, or has two more")
        return
    rows = [(f"{one.topic}:{one.partition}", one.source, one.target) for one in made]
    output.table({"moves": made}, ("partition", "from", "to"), rows)


@app.command("drain")
@client_command
def drain(
    client: Client, node: Node, *, dry_run: DryRun = False, output: OutputOption = Output.AUTO
) -> None:
    """Have a broker give away all that it has, and wait until it has nothing.

    Where there are several replicas another broker has its own first, and is in sync.

    It is given no partitions until `undrain`. That outlives its restarts, and Ctrl-C of this
    command.
    """
    plan = client.drain_broker(node, dry_run=dry_run).moves
    if dry_run:
        rows = [(f"{one.topic}:{one.partition}", one.source, one.target) for one in plan]
        output.table({"moves": plan}, ("partition", "from", "to"), rows)
        return
    had = _has(client.describe_cluster(), node)
    moving = sum(node in one.removing for one in _ongoing(client))
    if (left := had - moving - len(plan)) > 0:
        note(f"no other broker runs that may have {left} of the partitions: add one")
    with progress_bar(f"draining broker {node}", total=had) as update:
        _wait_until(client, Draining(node, had=had, update=update))
    output.report({"drained": node}, f"broker {node} has nothing; it can be stopped")


class Draining:
    """Whether the broker has nothing, as often as it is asked. Raises DrainEnded once it is not
    being drained any more: it would have something for ever.
    """

    def __init__(self, node: int, *, had: int, update: Callable[..., None]) -> None:
        self._node, self._had, self._update = node, had, update
        self._has_begun = False

    def __call__(self, cluster: ClusterDescription) -> bool:
        left = _has(cluster, self._node)
        self._update(completed=self._had - left)
        states = {one.state for one in cluster.brokers if one.node_id == self._node}
        self._has_begun |= "draining" in states
        if left and self._has_begun and "running" in states:
            raise DrainEnded(
                f"broker {self._node} is not being drained any more, and has {left} partitions"
            )
        return left == 0


class DrainEnded(RequestError):
    """Another has called `undrain`."""


def _wait_until(client: Client, condition: Callable[[ClusterDescription], bool]) -> None:
    while not condition(client.describe_cluster()):
        time.sleep(LOOK_S)


def _has(cluster: ClusterDescription, node: int) -> int:
    return sum(one.replicas for one in cluster.brokers if one.node_id == node)


@app.command("undrain")
@client_command
def undrain(client: Client, node: Node, output: OutputOption = Output.AUTO) -> None:
    """Let a drained broker have partitions again."""
    client.undrain_broker(node)
    output.report(
        {"undrained": node},
        f"broker {node} may lead again; `tierlog cluster rebalance` gives it its share",
    )


@app.command("remove")
@client_command
def remove(
    client: Client, node: Node, yes: YesOption = False, output: OutputOption = Output.AUTO
) -> None:
    """Remove a broker that has stopped, and has no partitions, for ever."""
    confirm(f"the data folder of broker {node} can never join the cluster again", yes=yes)
    client.remove_broker(node)
    output.report({"removed": node}, f"removed broker {node}")


@app.command("dev")
def dev(
    brokers: Annotated[int, typer.Option(min=1, max=9, help="How many brokers.")] = 3,
    data_dir: Annotated[
        Path, typer.Option(help="Folder for all files; used again, it goes on with them.")
    ] = Path(".tierlog-cluster"),
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Another store than a folder in there.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_000,
            help="Port of the first broker, if it is free; the others have those after it. By "
            f"default as the last time, at first {DEFAULT_PORT}.",
        ),
    ] = None,
    kafka_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_000,
            help=f"The same, for Kafka clients; at first {KAFKA_PORT}.",
        ),
    ] = None,
) -> None:
    """Run several brokers in one terminal, and watch who leads what; no flags needed."""
    from tierlog.cli.cluster_dev import run_lab

    run_lab(data_dir, brokers=brokers, store=store, port=port, kafka_port=kafka_port)
