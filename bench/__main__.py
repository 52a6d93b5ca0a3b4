"""`python -m bench [NAME…]`: measure all claims, or those named, and print their tables.

The exit code is 0 whatever the figures are. Only a claim that fails for another reason than a
missing peer ends the program with an error.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import page
from bench.children import MissingPeer
from bench.report import Report, save, show

CLAIMS: Final = (
    "raw_fetch",
    "produce_json",
    "record_fetch",
    "latency",
    "tails",
    "gateway_hop",
    "cold_read",
    "cluster_reads",
    "cluster_replicas",
    "store_replica",
    "offload",
    "manifest",
    "dataset_scan",
    "table_sync",
    "spark_scan",
    "spark_source",
    "spark_kafka",
    "spark_decode",
    "hot_append",
    "hot_durable",
    "hot_recovery",
    "hot_lookup",
    "broker_start",
    "console_pages",
    "compaction",
    "slow_disk",
    "client_records",
    "kafka_codec",
    "kafka_cpu",
    "kafka_wire",
    "kafka_tiered",
    "log_peers",
)
WIDTH_WITHOUT_TERMINAL: Final = 120


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("claims", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}")
    parser.add_argument("--rounds", type=int, default=0, help="more rounds reduce noise")
    parser.add_argument(
        "--page", action="store_true", help="write docs/figures.md from the last results"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.claims) - set(CLAIMS))
    if unknown:
        parser.error(f"unknown claim: {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    if arguments.page:
        print(page.write(CLAIMS))
        return
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    for name in arguments.claims or CLAIMS:
        _measure(name, console, rounds=arguments.rounds)


def _measure(name: str, console: Console, *, rounds: int) -> None:
    claim = importlib.import_module(f"bench.{name}")
    with tempfile.TemporaryDirectory(prefix=f"tierlog-bench-{name}-") as folder:
        try:
            with console.status(f"measuring {name}"):
                report: Report = claim.measure(Path(folder), rounds=rounds or claim.ROUNDS)
        except MissingPeer as missing:
            console.print(f"{name}: skipped, {missing}", style="yellow")
            return
    show(report, console)
    console.print(f"  saved to {save(report)}\n", style="dim", highlight=False)


if __name__ == "__main__":
    main()
