"""A topic in a bucket, its table in a SQLite catalog, and a process that forks for each run of
`sync`, which may be killed: PyIceberg takes two seconds to import.

    python -m tests.fakes.topic_tables

Each line of standard input is answered by a line: `run CALL FOLDER`, where the run is killed before
that call of the table's files and catalog (0: it is not), by its process id; `wait PID` by how it
ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table

from tests.fakes.bucket import NOW_MS, put_partition, segment_files, topic_id_of
from tests.fakes.cold_segments import FIXTURES, SegmentFiles
from tierlog.manifest.topic_objects import TopicObject, TopicObjects
from tierlog.object_store.open import open_store
from tierlog.record_format.encode import encode_batch
from tierlog.spark_reader.arrow_dataset import dataset
from tierlog.tables.catalog import (
    JSON_MODE,
    create_table,
    load_table,
    open_catalog,
    table_name,
)
from tierlog.tables.errors_table import errors_name
from tierlog.tables.json_columns import OWN, given_columns
from tierlog.tables.step_files import LocalWriter, StepWriter
from tierlog.tables.sync import Synced, TableSync, begin_tables, read_options

ROOT = Path(__file__).parents[2]
TOPIC = "many"
SEGMENTS = 10
SMALL = {"splitBytes": "16k"}
STEP_BYTES = 250 << 10  # some commits for all of it
DAY_MS = 86_400_000
DAY_RECORDS = 40  # of JSON; the others are of the next
COLUMNS = ("key", "value", "partition", "offset", "timestamp", "headers")


class TopicTable:
    """One topic, of a partition whose segments may be put one after another.

    Which catalog it is in, which topic it is of, and which broker and bucket have that, is written
    down in its folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warehouse: str = "",
        catalog: str = "",
        server: str = "",
        store: str = "",
        topic: str = "",
        **properties: str,
    ) -> None:
        self.folder, self.properties = folder, properties
        given = {"catalog": catalog, "server": server, "store": store, "topic": topic}
        for name, text in given.items():
            if text:
                (folder / f"{name}.given").write_text(text)
        self.url = self._given("store") or f"file://{folder}/bucket"
        self.warehouse = warehouse or f"file://{folder}/tables"
        self.topic = self._given("topic") or TOPIC
        self.name = table_name(None, self.topic)
        self.notes: list[str] = []
        self.is_cold = self._given("server") is None

    def _given(self, name: str) -> str | None:
        file = self.folder / f"{name}.given"
        return file.read_text() if file.exists() else None

    def open_catalog(self, kind: Any = None) -> Any:
        """`kind` is a class in place of the catalog's own."""
        url = self._given("catalog") or f"sqlite:///{self.folder}/catalog.db"
        found = open_catalog(url, {"warehouse": self.warehouse, **self.properties})
        return found if kind is None else kind(found.name, **found.properties)

    def put(self, first: int = 0, end: int = SEGMENTS) -> None:
        """These segments, which follow those that were put before."""
        store = open_store(self.url)
        if first == 0:
            self.put_topic(store)
        put_partition(store, TOPIC, 0, segment_files(FIXTURES / "many-segments-0")[first:end])

    def put_topic(self, store: Any) -> None:
        topic = TopicObject(
            name=TOPIC, topic_id=topic_id_of(TOPIC), partitions=1, config={}, created_ms=NOW_MS
        )
        TopicObjects(store).write_topic(topic, check=lambda: None)

    def create(self) -> Table:
        ((position, _),) = begin_tables(self.options())
        return create_table(self.open_catalog(), self.name, position)

    def options(self, until: int | None = None) -> Any:
        end = {} if until is None else {"endingOffsets": json.dumps({self.topic: {"0": until}})}
        server = "" if self.is_cold else self._given("server")
        place = {"server": server} if server else {"tier": "cold"}
        return read_options(
            {"store": self.url, "includeHeaders": "true"} | place | SMALL | end, self.topic
        )

    def run(
        self, *, catalog: Any = None, until: int | None = None, writer: StepWriter | None = None
    ) -> Synced:
        return TableSync(
            catalog=catalog or self.open_catalog(),
            name=self.name,
            topic=self.topic,
            options=self.options(until),
            commit_bytes=STEP_BYTES,
            writer=writer or LocalWriter(),
            log=self.notes.append,
            sleep=lambda _: None,
        ).sync_table()

    def load(self) -> Table:
        return load_table(self.open_catalog(), self.name)

    def rows(self) -> pa.Table:
        """What PyIceberg reads, in the log's order."""
        return in_order(self.load().scan().to_arrow())

    def expected(self) -> pa.Table:
        committed = dataset(
            TOPIC, store=self.url, tier="cold", includeHeaders=True, isolationLevel="read_committed"
        )
        return in_order(committed.to_table(columns=list(COLUMNS)))

    def files(self) -> set[str]:
        """Data files, and marks of attempts, that there are."""
        return {
            str(path.relative_to(self.folder))
            for place in ("data", "tierlog")
            for path in self.folder.glob(f"tables/tierlog/many*/{place}/**/*")
            if path.is_file()
        }


class JsonTable(TopicTable):
    """One of mode json; the topic has the values that were put, from offset 0."""

    def __init__(self, folder: Path, **properties: str) -> None:
        super().__init__(folder, **properties)
        self.values: list[bytes | None] = []

    def put_values(self, *values: object) -> None:
        """As a segment, with five records to a batch; what is not bytes or null, as JSON."""
        store, base = open_store(self.url), len(self.values)
        if not base:
            self.put_topic(store)
        log = self.folder / f"{base:020d}.log"
        texts = [one if isinstance(one, bytes | None) else dumps(one) for one in values]
        times = [NOW_MS + DAY_MS * (base + place >= DAY_RECORDS) for place in range(len(texts))]
        batches = [
            encode_batch(texts[at : at + 5], timestamps=times[at : at + 5], base_offset=base + at)
            for at in range(0, len(texts), 5)
        ]
        log.write_bytes(b"".join(batches))
        index, timeindex = log.with_suffix(".index"), log.with_suffix(".timeindex")
        index.write_bytes(b"\0\0\0\1\0\0\0\2")
        timeindex.write_bytes(b"t" * 12)
        end = base + len(texts)
        put_partition(store, TOPIC, 0, [SegmentFiles(base, end - 1, log, index, timeindex)])
        self.values += texts

    def create(self, *columns: str) -> Table:
        ((position, _),) = begin_tables(self.options())
        given = given_columns(columns)
        return create_table(self.open_catalog(), self.name, position, mode=JSON_MODE, columns=given)

    def json_rows(self) -> dict[int, dict[str, Any]]:
        """The columns of each record's value that are not null, by offset."""
        rows = self.load().scan().to_arrow().to_pylist()
        found = {
            row["_offset"]: {
                name: one for name, one in row.items() if one is not None and name not in OWN
            }
            for row in rows
        }
        assert len(found) == len(rows)
        return found

    def errors(self) -> dict[int, tuple[bytes, str]]:
        """Value and reason of each record that does not fit, by offset."""
        catalog = self.open_catalog()
        rows = load_table(catalog, errors_name(self.name)).scan().to_arrow().to_pylist()
        found = {row["offset"]: (row["value"], row["reason"]) for row in rows}
        assert len(found) == len(rows)
        return found

    def check_each_once(self) -> None:
        """Each record is in one of the tables, as it was sent."""
        rows, errors = self.json_rows(), self.errors()
        assert sorted([*rows, *errors]) == list(range(len(self.values)))
        for offset, row in rows.items():
            assert row == without_nulls(json.loads(self.values[offset] or b"{}"))
        assert {offset: value for offset, (value, _) in errors.items()} == {
            offset: self.values[offset] for offset in errors
        }


def dumps(value: object) -> bytes:
    return json.dumps(value).encode()


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in record.items() if one is not None}


def in_order(rows: pa.Table) -> pa.Table:
    return rows.select(list(COLUMNS)).sort_by([("partition", "ascending"), ("offset", "ascending")])


def check_each_once(table: TopicTable) -> None:
    """Each committed record is one row."""
    rows, expected = table.rows(), table.expected()
    assert rows["offset"].to_pylist() == expected["offset"].to_pylist()
    assert rows.to_pylist() == [
        record | {"headers": record["headers"] or []} for record in expected.to_pylist()
    ]


class Runs:
    """Runs of `sync`, each in a process of its own; `folder` gets their log."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "runs.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.topic_tables"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )

    def start(self, table: TopicTable, *, killed_at: int = 0) -> int:
        return self._ask(f"run {killed_at} {table.folder}")

    def wait(self, pid: int) -> int:
        return self._ask(f"wait {pid}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, line: str) -> int:
        self._process.stdin.write(line + "\n")
        return int(self._process.stdout.readline())


@contextmanager
def runs_of(folder: Path) -> Iterator[Runs]:
    runs = Runs(folder)
    try:
        yield runs
    finally:
        runs.close()


# --- the process ----------------------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        command, number, *folder = line.split(maxsplit=2)
        if command == "wait":
            _, status = os.waitpid(int(number), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif (pid := os.fork()) == 0:
            os._exit(run_once(Path(folder[0].rstrip("\n")), int(number)))
        else:
            print(pid, flush=True)


def run_once(folder: Path, killed_at: int) -> int:
    if killed_at:
        before_each_call(killed_at_call(killed_at))
    try:
        TopicTable(folder).run()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def killed_at_call(number: int) -> Callable[[], None]:
    calls, lock = count(1), threading.Lock()

    def call() -> None:
        with lock:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return call


def before_each_call(
    do: Callable[[], None], replace: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Of files that are written or deleted, and of commits, also after one."""
    for owner, name in (
        (PyArrowFileIO, "new_output"),
        (PyArrowFileIO, "delete"),
        (SqlCatalog, "commit_table"),
        (RestCatalog, "commit_table"),
    ):
        replace(owner, name, _wrapped(getattr(owner, name), do))


def _wrapped(method: Callable[..., Any], do: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        do()
        found = method(*arguments, **named)
        if method.__name__ == "commit_table":
            do()
        return found

    return called


if __name__ == "__main__":
    serve()
