"""A topic's table, written on Spark: the same rows and errors as by one process, each once."""

import json
from itertools import count

import pytest

pytest.importorskip("pyiceberg")

from tests.fakes.topic_tables import (
    TOPIC,
    JsonTable,
    TopicTable,
    before_each_call,
    check_each_once,
)
from tests.fakes.two_tiers import two_tiers
from tests.integration.tables.test_schema_mode import SchemaTable, avro, headed, record
from tests.unit.tables.test_sync import check_no_other_files
from tierlog.cli.program import run_command
from tierlog.record_format.errors import ConfigurationError
from tierlog.spark_reader.jobs.tasks import TasksFailed, run_tasks
from tierlog.spark_reader.splits import DataLoss
from tierlog.tables import spark_writer
from tierlog.tables.catalog import SCHEMA_MODE, create_table, load_table
from tierlog.tables.errors_table import errors_name
from tierlog.tables.row_task import RowTask
from tierlog.tables.spark_writer import SparkWriter
from tierlog.tables.sync import begin_tables

pytestmark = pytest.mark.spark

PAD = "x" * 5000


@pytest.fixture
def writer(spark):
    """Some tasks for each step of the tables' topics."""
    return SparkWriter(spark, task_bytes=40_000)


@pytest.fixture
def table(tmp_path):
    made = TopicTable(tmp_path)
    made.put()
    made.create()
    return made


def local_twin(table, folder, mode, columns=()):
    """Another table of the same topic, which one process has synced."""
    folder.mkdir()
    given = {"store": table.url, "topic": table.topic}
    if not table.is_cold:
        given["server"] = (table.folder / "server.given").read_text()
    twin = JsonTable(folder, **given)
    ((position, _),) = begin_tables(twin.options())
    create_table(twin.open_catalog(), twin.name, position, mode=mode, columns=columns)
    twin.run()
    return twin


def test_rows_are_those_of_the_log(table, writer):
    assert table.run(writer=writer).records == 177
    check_each_once(table)
    check_no_other_files(table)
    assert len(table.files()) > 10  # of as many tasks, in three steps


def test_columns_that_tasks_find_apart_are_those_that_one_process_finds(tmp_path, writer):
    table = JsonTable(tmp_path)
    table.put_values(*({"id": n, "pad": PAD} for n in range(9)), b"no JSON")
    table.create()
    table.run(writer=writer)
    table.put_values(*({"id": n, "price": n, "pad": PAD} for n in range(10)))
    table.put_values(*({"id": n, "price": n / 2, "pad": PAD} for n in range(11)))
    table.put_values(*({"id": "x", "at": {"x": n}, "pad": PAD} for n in range(10)))
    table.put_values(*({"id": n, "at": {"y": [n]}, "TAG": 1, "pad": PAD} for n in range(10)), None)
    table.put_values(*({"id": n, "pad": PAD, "tag": "a"} for n in range(5)))
    table.put_values(*({"id": n, "pad": PAD, "more": True} for n in range(5)))
    done = table.run(writer=writer)
    table.check_each_once()
    twin = local_twin(table, tmp_path / "twin", "json")
    assert table.json_rows() == twin.json_rows()
    assert table.errors() == twin.errors()
    assert done.errors == len(table.errors()) - 1
    schema = {field.name: str(field.field_type) for field in table.load().schema().fields}
    assert (schema["price"], schema["TAG"], schema["more"]) == ("long", "long", "boolean")
    check_no_other_files_of_json(table)


def test_schemas_that_tasks_meet_apart_make_the_columns_that_one_process_makes(tmp_path, writer):
    with two_tiers(tmp_path / "tiers") as tiers:
        table = SchemaTable(tiers, tmp_path)
        first = record(("id", "int"), ("pad", "string"))
        wider = record(("id", "long"), ("pad", "string"), ("delay", "int"))
        other = record(("id", "string"), ("pad", "string"))
        narrow = table.register(first)
        table.make()
        table.send(avro(narrow, first, {"id": 0, "pad": PAD}))
        table.run(writer=writer)
        text, wide = table.register(other), table.register(wider)
        for n in range(1, 20):
            table.send(avro(narrow, first, {"id": n, "pad": PAD}))
        for n in range(10):
            table.send(avro(wide, wider, {"id": n << 40, "pad": PAD, "delay": n}))
            table.send(avro(text, other, {"id": "x", "pad": PAD}), None, headed(99, b""))
        tiers.offload(table.topic)
        done = table.run(writer=writer)
        twin = local_twin(table, tmp_path / "twin", SCHEMA_MODE)
        assert table.json_rows() == twin.json_rows()
        assert table.errors() == twin.errors()
        assert (done.records, done.errors) == (39, 20)
        assert table.types() == {"id": "long", "pad": "string", "delay": "int"}
        assert sorted([*table.json_rows(), *table.errors()]) == list(range(len(table.values)))


def test_tasks_that_run_twice_add_their_rows_once(tmp_path, writer, monkeypatch):
    """As those that are slow do, or whose result is lost."""

    def twice(session, work, count, **more):
        run_tasks(session, work, count, **more)
        return run_tasks(session, work, count, **more)

    monkeypatch.setattr(spark_writer, "run_tasks", twice)
    table = JsonTable(tmp_path)
    table.put_values(*({"id": "x" if n % 5 == 4 else n, "pad": PAD} for n in range(30)))
    table.create()
    assert table.run(writer=writer) == (1, 24, 6)
    table.check_each_once()
    check_no_other_files_of_json(table)


class Killed(BaseException):
    pass


def test_a_driver_that_is_killed_at_any_call_leaves_nothing_out_and_nothing_twice(
    tmp_path, writer, monkeypatch
):
    """Nothing that it asks for after that takes place."""
    table = JsonTable(tmp_path)
    table.put_values(*({"id": "x" if n % 5 == 4 else n, "pad": PAD} for n in range(10)))
    table.create()
    for last in count():
        calls = count()

        def call(calls=calls, last=last):
            if next(calls) >= last:
                raise Killed

        with monkeypatch.context() as patch:
            before_each_call(call, patch.setattr)
            try:
                table.run(writer=writer)
            except Killed:
                continue
        break
    assert last >= 9  # of two commits
    table.run(writer=writer)
    table.check_each_once()
    check_no_other_files_of_json(table)


def test_the_command_writes_on_spark(spark, tmp_path, capsys):
    table = TopicTable(tmp_path)
    table.put(0, 2)
    table.create()
    catalog = ("--catalog", f"sqlite:///{table.folder}/catalog.db", "--warehouse", table.warehouse)
    assert run_command(("table", "sync", TOPIC, "--spark", "--store", table.url, *catalog)) == 0
    assert json.loads(capsys.readouterr().out)["commits"] == 1
    check_each_once(table)


class FailsAfterWriting(RowTask):
    def __call__(self, number):
        written = super().__call__(number)
        raise OSError(f"{self} after {len(written.paths)} files")


class MeetsDataLoss(RowTask):
    def __call__(self, number):
        raise DataLoss("offsets 1 to 2 are gone")


class LacksAPackage(RowTask):
    def __reduce__(self):
        return __import__, ("package_of_nobody",)


@pytest.mark.parametrize(
    ("fails", "error", "text"),
    [
        (MeetsDataLoss, DataLoss, "offsets 1 to 2 are gone"),
        (LacksAPackage, ConfigurationError, "an executor lacks .*'package_of_nobody', for /"),
        (FailsAfterWriting, TasksFailed, "a task on Spark failed: .*after 1 files"),
    ],
    ids=["data loss", "no package", "failure"],
)
def test_a_step_whose_task_fails_leaves_nothing_and_shows_no_secret(
    fails, error, text, tmp_path, writer, monkeypatch, capfd
):
    table = TopicTable(tmp_path, **{"s3.secret-access-key": "not-for-logs"})
    table.put(0, 2)
    table.create()
    monkeypatch.setattr(spark_writer, "RowTask", fails)
    with pytest.raises(error, match=text):
        table.run(writer=writer)
    assert "not-for-logs" not in "".join(capfd.readouterr())
    table.run()  # in this process: Spark's have to start anew
    table.run()
    check_each_once(table)
    check_no_other_files(table)


def check_no_other_files_of_json(table):
    """Than those of the tables; and no attempt is under way."""
    catalog = table.open_catalog()
    found = {
        one.file.file_path.removeprefix(f"file://{table.folder}/")
        for name in (table.name, errors_name(table.name))
        for one in load_table(catalog, name).scan().plan_files()
    }
    assert table.files() == found
