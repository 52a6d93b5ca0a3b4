"""`tierlog demo`: from produce to Spark on real data, step by step, each step verified.

It fails if anything shown is not true: a cold read that was not cold, a missing record, a figure
that differs from the source's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.output import format_size, format_time, print_table
from tierlog.record_format.errors import TierlogError

if TYPE_CHECKING:
    from tierlog.cli.demo_flights import CarrierDelays, StartingSession
    from tierlog.cli.demo_processes import ChildProcess
    from tierlog.client.client import Client
    from tierlog.client.responses import FetchedRecords, TopicDescription

TOPIC = "flights"
PARTITIONS = 3
SEGMENT_BYTES = 4 << 20
LOCAL_BYTES = 2 * SEGMENT_BYTES
BUCKET = "tierlog-demo"
CONFIG = {
    "segment.bytes": SEGMENT_BYTES,
    # Segments also roll by record timestamps: with the default week, a year would make many.
    "segment.ms": 10 * 365 * 86_400_000,
    "local.retention.bytes": LOCAL_BYTES,
    "retention.ms": -1,
}
INDEPENDENCE_DAY = "2013-07-04T12:00:00Z"
OFFLOAD_TIMEOUT_S = 120.0


class DemoFailed(TierlogError):
    """A step's result is not as expected."""


@dataclass
class Stage:
    """The demo's processes and addresses, and the facts for its summary."""

    folder: Path
    environment: dict[str, str]
    endpoint: str = ""
    server: str = ""
    s3_server: ChildProcess | None = None
    broker: ChildProcess | None = None
    kernel: ChildProcess | None = None
    spark: StartingSession | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def store(self) -> str:
        return f"s3://{BUCKET}/log"

    @property
    def serve_flags(self) -> list[str]:
        return [
            "--data-dir",
            str(self.folder / "data"),
            "--store",
            self.store,
            "--s3-endpoint",
            self.endpoint,
            "--listen",
            self.server.removeprefix("http://"),
            "--retention-check-interval",
            "1",
            "--allow-single-writer-store",
        ]

    @property
    def spark_options(self) -> dict[str, str]:
        return {"store": self.store, "endpoint": self.endpoint, "subscribe": TOPIC}


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running at the end.")
    ] = False,
    port: Annotated[int, typer.Option(help="The broker's port, if it is free.")] = 8640,
) -> None:
    """Send the flights of 2013 through both tiers: produce, offload, fetch, and read with Spark."""
    from tierlog.cli.demo_flights import expected_delays, load_flights

    flights = load_flights()
    folder = Path(tempfile.mkdtemp(prefix="tierlog-demo-"))
    stage = Stage(folder, _environment())
    try:
        with ExitStack() as stack:
            stack.callback(_stop_all, stage)
            _print(f"logs and data in {folder}")
            _start(stage, port)
            expected = expected_delays(flights)
            _run_steps(stage, flights, expected)
            if keep:
                _leave_running(stage)
                stack.pop_all()
    except (KeyboardInterrupt, ModuleNotFoundError):  # after any other failure the logs are kept
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not keep:
        shutil.rmtree(folder)


def _run_steps(stage: Stage, flights: Any, expected: dict[str, CarrierDelays]) -> None:
    from tierlog.client.client import Client

    with Client(stage.server) as client:
        client.create_topic(TOPIC, partitions=PARTITIONS, config=CONFIG)
        _produce(client, flights, stage)
        _wait_until_cold(client, stage)
        _fetch_from_both_tiers(client, flights.num_rows)
        options = {**stage.spark_options, "server": stage.server}
        session = _started_spark(stage, options)
        _check_spark(session, options, expected, stage, "both tiers")
        _step("offload the rest, stop the broker")
        left = client.offload(TOPIC, wait_ms=60_000)
        _require(left.remaining_segments == 0, f"{left.remaining_segments} segments remain")
        assert stage.broker is not None
        code = stage.broker.stop()
        _require(code == 0, f"the broker exited with {code}")
        options = {**stage.spark_options, "tier": "cold"}
        _check_spark(session, options, expected, stage, "the bucket alone, no broker")
    _stop_spark(stage)
    _summary(stage)


# --- the steps ------------------------------------------------------------------------------------


def _start(stage: Stage, port: int) -> None:
    from tierlog.cli import demo_processes as processes
    from tierlog.cli.demo_flights import StartingSession

    _step("start an S3 server (moto), a broker and Spark, a process each")
    # Spark and the compiler start in the background.
    stage.spark = StartingSession(stage.folder / "spark.log")
    stage.kernel = processes.start_compiling(stage.folder, stage.environment)
    s3_port = processes.free_port()
    stage.endpoint = f"http://127.0.0.1:{s3_port}"
    stage.s3_server = processes.start_s3_server(stage.folder, stage.environment, port=s3_port)
    processes.create_bucket(stage.endpoint, BUCKET)
    stage.server = f"http://127.0.0.1:{processes.free_port(port)}"
    _start_broker(stage)


def _start_broker(stage: Stage) -> None:
    from tierlog.cli import demo_processes as processes

    stage.broker = processes.start_broker(
        stage.folder, stage.environment, flags=stage.serve_flags, server=stage.server
    )


def _produce(client: Client, flights: Any, stage: Stage) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from tierlog.cli.demo_flights import as_records

    began = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(highlight=False)) as progress:
        task = progress.add_task("  produce flights", total=flights.num_rows, rate="")
        done = 0
        for records in as_records(flights):
            produced = client.produce(TOPIC, records)
            done += sum(result.records for result in produced.results)
            rate = f"{done / (time.monotonic() - began):,.0f} records/s"
            progress.update(task, completed=done, rate=rate)
    seconds = time.monotonic() - began
    _require(done == flights.num_rows, f"{done} of {flights.num_rows} flights were acknowledged")
    rate = f"{done / seconds:,.0f} records/s, acks=all, JSON over HTTP"
    _print(f"  {done:,} flights in {seconds:.1f} s: {rate}")
    stage.facts.append(("produced", f"{done:,} flights, {rate}"))


def _wait_until_cold(client: Client, stage: Stage) -> None:
    _step("wait until rolled segments are in the bucket and deleted locally")
    deadline = time.monotonic() + OFFLOAD_TIMEOUT_S
    while not _is_settled(topic := client.describe_topic(TOPIC)):
        _require(time.monotonic() < deadline, "segments were not offloaded in time")
        time.sleep(0.2)
    hot = sum(one.hot_bytes for one in topic.partitions)
    cold = sum(one.cold_bytes for one in topic.partitions)
    print_table("", _TIER_COLUMNS, [_tier_row(client, one) for one in topic.partitions])
    _print("")
    stage.facts.append(("in the bucket", format_size(cold)))
    stage.facts.append(("on local disk", format_size(hot)))


_TIER_COLUMNS = (
    "partition",
    "records",
    "only cold",
    "in both",
    "only hot",
    "cold bytes",
    "hot bytes",
    "segments",
)


def _is_settled(topic: TopicDescription) -> bool:
    """Every partition has deleted local segments, and only the active one is not uploaded."""
    return all(
        one.local_log_start_offset > one.log_start_offset
        and one.hot_bytes <= LOCAL_BYTES + SEGMENT_BYTES
        and one.offload_lag_bytes <= SEGMENT_BYTES
        for one in topic.partitions
    )


def _tier_row(client: Client, one: Any) -> tuple[object, ...]:
    records = {"cold": 0, "both": 0, "hot": 0}
    for segment in client.segments(TOPIC, one.partition):
        records[segment.tier] += segment.last_offset - segment.base_offset + 1
    return (
        one.partition,
        sum(records.values()),
        records["cold"],
        records["both"],
        records["hot"],
        format_size(one.cold_bytes),
        format_size(one.hot_bytes),
        one.segments,
    )


def _fetch_from_both_tiers(client: Client, rows: int) -> None:
    from tierlog.client.wire import Limits

    one = Limits(max_records=1)
    first = _timed_fetch(client, "first record", offset="earliest", limits=one)
    end = client.offsets(TOPIC, 0).high_watermark
    last = _timed_fetch(client, "last record", offset=end - 1, limits=one)
    at_noon = _timed_fetch(client, INDEPENDENCE_DAY, timestamp=INDEPENDENCE_DAY, limits=one)
    _require(first.tier == "cold", f"the first record came from {first.tier}, not from cold")
    _require(last.tier == "hot", f"the last record came from {last.tier}, not from hot")
    _require(
        format_time(at_noon.records[0].timestamp) >= INDEPENDENCE_DAY,
        "a record from before the requested time",
    )
    total = sum(client.offsets(TOPIC, partition).high_watermark for partition in range(PARTITIONS))
    _require(total == rows, f"the log holds {total} records, not {rows}")


def _timed_fetch(client: Client, what: str, **asked: Any) -> FetchedRecords:
    began = time.monotonic()
    found = client.fetch(TOPIC, 0, **asked)
    seconds = time.monotonic() - began
    _require(len(found.records) == 1, f"{what}: no record")
    record = found.records[0]
    _print(
        f"  fetch {what}: offset {record.offset} at {format_time(record.timestamp)}, {found.tier}, "
        f"{seconds * 1000:.0f} ms: {_flight(record.value)}"
    )
    return found


def _flight(value: bytes | None) -> str:
    import msgspec

    row = msgspec.json.decode(value or b"{}")
    return f"{row['carrier']} {row['flight']} {row['origin']}-{row['dest']} ({row['tailnum']})"


def _started_spark(stage: Stage, options: dict[str, str]) -> Any:
    from tierlog.cli.demo_flights import warm_up
    from tierlog.cli.on_spark import silence_interrupts

    silence_interrupts()
    began = time.monotonic()
    _step("wait for Spark, and for its Python workers to start: a query over three records")
    assert stage.kernel is not None
    assert stage.spark is not None
    code = stage.kernel.wait()
    _require(code == 0, f"the Arrow kernel could not be compiled, exit code {code}")
    session = stage.spark.get()
    warm_up(session, options, PARTITIONS)
    _print(f"  {time.monotonic() - began:.1f} s")
    return session


def _check_spark(
    session: Any,
    options: dict[str, str],
    expected: dict[str, CarrierDelays],
    stage: Stage,
    where: str,
) -> None:
    from tierlog.cli.demo_flights import delays_on_spark

    began = time.monotonic()
    _step(f"Spark over {where}")
    found = delays_on_spark(session, options)
    seconds = time.monotonic() - began
    rows = [
        (
            carrier,
            delays.flights,
            f"{delays.mean_delay:.2f}",
            f"{delays.cancelled_share:.2%}",
            "equal" if found.get(carrier) == delays else f"NOT EQUAL: {found.get(carrier)}",
        )
        for carrier, delays in sorted(expected.items())
    ]
    if "tier" not in options or found != expected:
        columns = ("carrier", "flights", "mean departure delay", "cancelled", "Spark and source")
        print_table("", columns, rows)
    _require(found == expected, f"Spark over {where} differs from the source")
    count = sum(one.flights for one in found.values())
    _print(f"  Spark over {where}: {count:,} flights, equal to the source, {seconds:.1f} s\n")
    stage.facts.append((f"Spark, {where}", f"equal, {count / seconds:,.0f} records/s"))


def _summary(stage: Stage) -> None:
    print_table("results", ("", ""), stage.facts)
    _print(f"\n  all in {time.monotonic() - stage.began:.0f} s. Continue by hand:\n")
    if shutil.which("tierlog", path=stage.environment.get("PATH")) is None:
        _print(f"    . {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}")
    _print("    tierlog demo --keep        run again, and leave everything running")
    _print("    tierlog dev                a broker of your own; in another terminal:")
    _print("    tierlog topic create hello")
    _print("    seq 1 1000 | tierlog produce hello")
    _print("    tierlog consume hello\n")


def _leave_running(stage: Stage) -> None:
    _step("start the broker again")
    _start_broker(stage)
    assert stage.broker is not None
    assert stage.s3_server is not None
    server = shlex.quote(stage.server)
    _print(
        f"""
  The console: {stage.server}/        the API: {stage.server}/docs

    tierlog consume {TOPIC} --server {server} --format json --max-records 3
    tierlog storage segments {TOPIC} --server {server}
    tierlog topic describe {TOPIC} --server {server}

  Stop it: kill {stage.broker.pid} {stage.s3_server.pid} && rm -r {shlex.quote(str(stage.folder))}
"""
    )


# --- around the steps -----------------------------------------------------------------------------


def _step(what: str) -> None:
    _print(f"- {what}")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise DemoFailed(f"the demo failed: {otherwise}")


def _stop_spark(stage: Stage) -> None:
    if stage.spark is not None:
        stage.spark.stop()
        stage.spark = None


def _stop_all(stage: Stage) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not interrupt the cleanup
        signal.signal(number, signal.SIG_IGN)
    try:
        _stop_spark(stage)
    finally:  # Spark's JVM may be gone; these would outlive the demo
        for child in (stage.broker, stage.kernel, stage.s3_server):
            if child is not None:
                child.stop()


def _environment() -> dict[str, str]:
    """Set credentials for the demo's S3 server: here, for Spark, and for the children."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",  # the demo's S3 server does not check it
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    return {name: value for name, value in os.environ.items() if not name.startswith("TIERLOG_")}
