"""The jobs that run on Spark, in the session of these tests."""

import json
import re
import signal
import socket
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.dataset as ds
import pytest

from tests.fakes import spark_process
from tests.fakes.forked import ROOT
from tests.fakes.two_tiers import two_tiers
from tierlog.cli.program import run_command
from tierlog.client.client import Client
from tierlog.record_format.errors import InvalidRequest
from tierlog.record_format.findings import ProblemKind
from tierlog.spark_reader.jobs import replay as replay_module
from tierlog.spark_reader.jobs import verify as verify_module
from tierlog.spark_reader.jobs.hadoop_files import HadoopFolder
from tierlog.spark_reader.jobs.replay import ToFiles, ToTopic, replay
from tierlog.spark_reader.jobs.stats import chart_svg, stats
from tierlog.spark_reader.jobs.verify import verify
from tierlog.spark_reader.splits import DataLoss

pytestmark = pytest.mark.spark

HOUR_MS = 3_600_000


def source(tiers, **extra):
    both = {"store": tiers.store_url, "server": tiers.url, "subscribe": "flights"}
    return both | {"splitBytes": "32k"} | extra


def written(tiers, topic="flights"):
    return [
        (partition, one.offset, one.key, one.value, one.timestamp)
        for (name, partition), listed in tiers.written.items()
        if name == topic
        for one in listed
    ]


def replayed(folder):
    """The rows of a Parquet folder, whose path must match their day."""
    partitioning = ds.partitioning(flavor="hive")
    table = ds.dataset(str(folder), format="parquet", partitioning=partitioning).to_table()
    rows = []
    for row in table.to_pylist():
        moment = row["timestamp"]
        assert str(row["date"]) == f"{moment:%Y-%m-%d}"
        at = round(moment.timestamp() * 1000)
        rows.append((row["partition"], row["offset"], row["key"], row["value"], at))
    return sorted(rows)


def die_after_count(frame):
    """Fail after Spark has written the step, before it is published."""

    def die():
        raise OSError("killed before it was published")

    return replay_module.really_counted(frame)[0], die


def die_while_publishing(folder, name, to):
    """Fail once the position after the second step is written, before it has its name."""
    if to.endswith("position-00002.json"):
        raise OSError("killed while publishing")
    folder.really_move(name, to)


def die_while_moving(folder, name, to):
    """Fail to move the second file of the second step."""
    if "step-00001" in name and folder.moved:
        raise OSError("killed between the files")
    folder.moved = "step-00001" in name
    folder.really_move(name, to)


def test_an_interrupted_replay_goes_on_and_writes_every_row_once(
    spark, tiers, tmp_path, monkeypatch
):
    monkeypatch.setattr(replay_module, "really_counted", replay_module._counted, raising=False)
    monkeypatch.setattr(HadoopFolder, "really_move", HadoopFolder.move, raising=False)
    monkeypatch.setattr(HadoopFolder, "moved", False, raising=False)
    out, notes = tmp_path / "out", tmp_path / "out/_tierlog_replay"

    def run(**extra):
        options = source(tiers, splitBytes="128k", **extra)
        return replay(
            spark, options, ToFiles(folder=out.as_uri()), step_bytes=600_000, log=lambda _: None
        )

    for target_object, name, replacement, message in (
        (replay_module, "_counted", die_after_count, "before it was published"),
        (HadoopFolder, "move", die_while_publishing, "while publishing"),
        (HadoopFolder, "move", die_while_moving, "between the files"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target_object, name, replacement)
            with pytest.raises(OSError, match=message):
                run()
    assert run().total_records == 4800
    assert replayed(out) == sorted(written(tiers))
    again = run()
    assert (again.steps, again.records, again.total_records) == (0, 0, 4800)
    assert [one.name.partition("-")[0] for one in notes.glob("[!.]*")] == ["position"]
    with pytest.raises(InvalidRequest, match="belongs to another replay: endingOffsets"):
        run(endingOffsets='{"flights": {"0": 10}}')
    with pytest.raises(InvalidRequest, match="is not empty"):
        replay(spark, source(tiers), ToFiles(folder=tmp_path.as_uri()), log=lambda _: None)


@pytest.mark.parametrize("is_local", [True, False])
def test_two_replays_at_once_on_one_folder_are_refused(
    spark, tiers, tmp_path, monkeypatch, is_local
):
    monkeypatch.setattr(HadoopFolder, "is_local", is_local)
    target, refused = ToFiles(folder=(tmp_path / "out").as_uri()), []

    def begin_another(*_):
        with pytest.raises(InvalidRequest, match=r"another run writes to .*out: it holds .*lock"):
            replay(spark, source(tiers), target, log=lambda _: None)
        refused.append(True)

    done = replay(spark, source(tiers), target, log=begin_another)
    assert refused
    assert done.total_records == 4800
    assert replayed(tmp_path / "out") == sorted(written(tiers))
    assert replay(spark, source(tiers), target, log=lambda _: None).steps == 0


def test_a_second_replay_goes_on_where_the_first_ended_with_a_file_a_task_and_day(spark, tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights", partitions=2)
        target = ToFiles(folder=(tmp_path / "out").as_uri())
        for records in (500, 700):
            tiers.produce("flights", records)
            report = replay(spark, source(tiers, splitBytes="1m"), target, log=lambda _: None)
            assert (report.steps, report.records) == (1, 2 * records)
            assert replayed(tmp_path / "out") == sorted(written(tiers))
            tiers.offload("flights")
        files = list((tmp_path / "out").rglob("*.parquet"))
        assert {one.parent.parent for one in files} == {tmp_path / "out"}
        of_tasks = {(one.parent.name, one.name[: len("00001-part-00003")]) for one in files}
        assert len(of_tasks) == len(files)


def test_an_offset_range_is_replayed_to_json_lines(spark, tiers, tmp_path):
    target = ToFiles(folder=(tmp_path / "out").as_uri(), kind="json", base64=True)
    extra = {"assign": '{"flights": [1]}', "startingOffsets": '{"flights": {"1": 1490}}'}
    options = {k: v for k, v in source(tiers).items() if k != "subscribe"} | extra
    assert replay(spark, options, target, log=lambda _: None).records == 110
    lines = [
        json.loads(line)
        for file in (tmp_path / "out").glob("date=*/*.json")
        for line in file.read_text().splitlines()
    ]
    found = sorted((line["offset"], b64decode(line["value"])) for line in lines)
    assert found == [(one.offset, one.value) for one in tiers.written["flights", 1][1490:]]


def die_before_recording(folder, name, text):
    """Fail after the rows of the second step are written, before it is recorded."""
    if name.endswith("position-00002.json"):
        raise OSError("killed before it was recorded")
    folder.really_write_text(name, text)


def test_a_replay_to_a_topic_keeps_the_order_and_repeats_an_interrupted_step(
    spark, tmp_path, monkeypatch
):
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights", partitions=2)
        tiers.produce("flights", 500)
        tiers.offload("flights")
        tiers.create("copy", partitions=2)
        target = ToTopic(
            options={"server": tiers.url, "topic": "copy"}, notes=(tmp_path / "notes").as_uri()
        )

        def run(to=target, **extra):
            options = source(tiers, **extra)
            return replay(spark, options, to, step_bytes=64_000, log=lambda _: None)

        with monkeypatch.context() as patch:
            patch.setattr(HadoopFolder, "really_write_text", HadoopFolder.write_text, raising=False)
            patch.setattr(HadoopFolder, "write_text", die_before_recording)
            with pytest.raises(OSError, match="before it was recorded"):
                run()
        (tmp_path / "token").write_text("any")
        reports = [run(), run(splitBytes="16k", tokenFile=str(tmp_path / "token"))]
        assert [(report.total_records, report.steps) for report in reports] == [
            (1000, 2),
            (1000, 0),
        ]
        with pytest.raises(InvalidRequest, match="belongs to another replay: keep partitions"):
            run(replace(target, keep_partitions=False))
        with Client(tiers.url) as client:
            copied = {0: [], 1: []}
            for one in client.consume("copy"):
                copied[one.partition].append((one.key, one.value, one.timestamp))
        for partition, rows in copied.items():
            sent = [
                (one.key, one.value, one.timestamp) for one in tiers.written["flights", partition]
            ]
            first = len(rows) - len(sent)  # records of the second step
            assert rows == sent + sent[-first:]
            assert 0 < first < len(sent)


def test_a_replay_does_not_resume_with_a_re_created_topic(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(HadoopFolder, "really_write_text", HadoopFolder.write_text, raising=False)
    target = ToFiles(folder=(tmp_path / "out").as_uri())
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights", partitions=1)
        tiers.produce("flights", 500)
        with monkeypatch.context() as patch:
            patch.setattr(HadoopFolder, "write_text", die_before_recording)
            with pytest.raises(OSError, match="before it was recorded"):
                replay(spark, source(tiers), target, step_bytes=20_000, log=lambda _: None)
        tiers.broker.delete_topic("flights")
        tiers.create("flights", partitions=1)
        tiers.produce("flights", 1000)
        with pytest.raises(DataLoss, match="topic 'flights' was deleted and re-created"):
            replay(spark, source(tiers), target, step_bytes=20_000, log=lambda _: None)


def test_verify_reads_every_byte_on_the_executors(spark, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # the extra `spark` does not install it
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights", partitions=2)
        tiers.produce("flights", 200)
        tiers.offload("flights")
        options = {"store": tiers.store_url, "subscribe": "flights"}
        report = verify(spark, options, clock=lambda: 0)
        cold = sum(tiers.cold_end("flights", partition) for partition in (0, 1))
        assert (report.ok, report.problems) == (True, [])
        assert (report.checked.records, report.checked.partitions) == (cold, 2)

        logs = sorted(Path(tiers.store_url.removeprefix("file://")).rglob("*.log"))
        body = bytearray(logs[1].read_bytes())
        body[-1] ^= 1
        logs[1].write_bytes(body)
        logs[-1].unlink()
        report = verify(spark, options, clock=lambda: 0)
        kinds = [(one.kind, one.partition) for one in report.problems]
        assert kinds == [("chunk-corrupt", 0), ("object-missing", 1)]
        assert report.problems[0].object_key.endswith(logs[1].name)


def test_verify_reads_each_segment_once_and_reports_in_order(spark, tiers, tmp_path, monkeypatch):
    check_segment, read = verify_module.check_segment, tmp_path / "read"

    def recording(store, entry, *, partition, deep):
        with read.open("a") as file:
            file.write(f"{partition} {entry.base_offset}\n")
        found = check_segment(store, entry, partition=partition, deep=deep)
        found.add_problem(ProblemKind.GAP, "", base_offset=entry.base_offset)
        return found

    monkeypatch.setattr(verify_module, "check_segment", recording)
    options = {"store": tiers.store_url, "subscribe": "flights"}
    report = verify(spark, options, clock=lambda: 0)
    lines = [tuple(map(int, line.split())) for line in read.read_text().splitlines()]
    assert len(lines) == report.checked.segments > 3
    assert [(one.partition, one.base_offset) for one in report.problems] == sorted(lines)


def test_an_error_in_the_tasks_of_a_job_is_one_line(spark, tiers, tmp_path, capsys):
    to = ("--to-topic", "copy", "--to-server", "http://127.0.0.1:1", "--notes", str(tmp_path))
    assert run_command(("replay", "flights", "--store", tiers.store_url, *to)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("tierlog: cannot reach the broker: ")


@pytest.mark.soak  # a session of its own
def test_an_interrupted_job_exits_130_without_a_traceback(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = ["stats", "t", "--store", "s3://bucket", "--s3-endpoint", url]
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        job = subprocess.Popen(
            [sys.executable, "-m", "tierlog.cli.main", *command],
            env=spark_process.environment() | keys | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.settimeout(120)
        listener.accept()[0].close()
        job.send_signal(signal.SIGINT)
    stderr = job.communicate(timeout=120)[1]
    assert job.returncode == 130
    assert not re.search("Traceback|Error", stderr)


def test_stats_from_a_time_are_printed_as_a_table(spark, tiers, capsys):
    options = ("stats", "flights", "--store", tiers.store_url)
    later = ("--from-time", "2100-01-01T00:00:00Z", "--output", "json")
    assert run_command((*options, *later)) == 0
    assert json.loads(capsys.readouterr().out)["hours"] == []
    assert run_command((*options, "--from-time", "1300", "-p", "1", "--output", "text")) == 0
    table, summary = capsys.readouterr()
    cold = tiers.cold_end("flights", 1)
    assert "2023-11-14T22:00:00Z" in table
    assert f"flights: {cold:,} records, " in summary


def test_stats_count_every_record_once_and_the_chart_is_valid_svg(spark, tiers):
    rows = stats(spark, source(tiers))
    expected = {}
    for partition, _, key, value, at in written(tiers):
        hour = expected.setdefault((at // HOUR_MS * HOUR_MS, partition), [0, 0, 0, 0])
        for index, amount in enumerate((1, len(key or b""), len(value), key is None)):
            hour[index] += amount
    found = {
        (row.hour_ms, row.partition): [
            row.records,
            row.key_bytes,
            row.value_bytes,
            row.without_key,
        ]
        for row in rows
    }
    assert found == expected
    assert all(row.value_p50 == row.value_max == 100 for row in rows)
    chart = ElementTree.fromstring(chart_svg(rows, title="a <b> & c"))
    bars = [one for one in chart if one.tag.endswith("rect")]
    assert len(bars) == 1 + 3 + 2 * len(rows)  # background, legend, two panels
    assert ElementTree.fromstring(chart_svg([], title="nothing")) is not None
