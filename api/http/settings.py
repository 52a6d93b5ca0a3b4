"""The settings of the HTTP server: its limits and its clock. Read at the edge and passed in.

What exceeds a limit is refused, never clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from tierlog.host.clock import wall_clock_ms

KIB: Final = 1 << 10
MIB: Final = 1 << 20

MAX_FETCH_BYTES: Final = 64 * MIB
MAX_WAIT_MS: Final = 60_000
MAX_OFFSET: Final = 2**63 - 1
MAX_PARTITION: Final = 2**31 - 1


class ShownTable(NamedTuple):
    """What the console shows of a topic's table: as `tierlog.tables` has it. `refused`: the latest
    rows of the table of errors, and the id of the schema that most of them are of; why they cannot
    be read is in `problem`.
    """

    status: Any
    refused: list[Any]
    refused_schema_id: int | None
    problem: str


FindTable: TypeAlias = Callable[[str, str], ShownTable | None]
"""By a topic's name and id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    body_max_bytes: int = 64 * MIB
    control_body_max_bytes: int = MIB  # of calls that carry no records
    expanded_max_bytes: int = 256 * MIB
    decoding_max_bytes: int = 512 * MIB
    records_max: int = 1_000_000
    connections_max: int = 10_000
    inflight_max_bytes: int = 512 * MIB
    header_max_bytes: int = 64 * KIB
    header_timeout_ms: int = 10_000
    body_idle_timeout_ms: int = 30_000
    body_rate_min: int = 1 * KIB  # a second
    send_idle_timeout_ms: int = 120_000
    keep_alive_ms: int = 75_000
    shutdown_timeout_ms: int = 30_000
    # Larger bodies and responses are parsed and written by a thread, not by the event loop.
    inline_max_bytes: int = 64 * KIB
    read_threads: int = 16
    write_threads: int = 8
    parse_threads: int = 4
    search_threads: int = 2
    check_host: bool = True  # accept only loopback names, on a broker without tokens
    # Tokens are required if the file exists, and with `tokens_required` even if it does not.
    tokens_file: Path | None = None
    tokens_required: bool = False
    client_requests_max: int | None = None  # a second
    peers_ca_file: str | None = None  # of the brokers of a cluster, for each other
    heartbeat_ms: int = 15_000
    leader_wait_ms: int = 5_000  # of a call in a cluster while nobody leads what it is about
    console_sample_ms: int = 5_000  # the interval of the console's charts
    # Of keys and values that are decoded by their schemas: of each, and for a page of them.
    decode_max_bytes: int = 256 * KIB
    decode_max_ms: int = 5_000
    # The table of a topic, by its name and id, if a catalog is known and has one. May block; raises
    # RequestError, RetriableError, CorruptDataError.
    find_table: FindTable | None = None
    # A search of the console ends after it has read so much, or taken so long.
    search_max_bytes: int = 1024 * MIB
    search_max_ms: int = 30_000
    searches_max: int = 4  # at once
    clock: Callable[[], int] = wall_clock_ms
