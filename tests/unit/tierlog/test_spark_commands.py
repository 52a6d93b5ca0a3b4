"""The configuration of the session that a Spark command starts."""

import re
import signal
from contextlib import contextmanager
from pathlib import Path
from urllib.request import url2pathname

import pytest

from tierlog.cli.on_spark import job
from tierlog.cli.program import run_command
from tierlog.record_format.errors import ConfigurationError


@pytest.fixture
def session_config(monkeypatch):
    pytest.importorskip("pyspark")
    session_config = {}

    @contextmanager
    def job_session(name, *, master, config):
        session_config.update(config)
        yield

    monkeypatch.setattr("tierlog.spark_reader.jobs.session.job_session", job_session)
    return session_config


def test_sparks_log_is_discarded_by_default(session_config):
    with job("tierlog stats", master=None, conf=None):
        option, file = session_config["spark.driver.extraJavaOptions"].split("=")
    assert option == "-Dlog4j2.configurationFile"
    assert "Null" in Path(url2pathname(file.removeprefix("file://"))).read_text()


def test_a_log_level_in_conf_keeps_sparks_log(session_config):
    with job("tierlog stats", master=None, conf=["spark.log.level=WARN"]):
        assert session_config == {"spark.log.level": "WARN"}


JAVA = """An error occurred while calling o134.save.
: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to \
file:/small/part-0.json. SQLSTATE: 58030
\tat org.apache.spark.sql.classic.DataFrameWriter.save(DataFrameWriter.scala:116)
\tSuppressed: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed
\tCaused by: java.io.IOException: of what is suppressed
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
\t... 54 more
Caused by: java.io.IOException: No space left on device
\t... 54 more
"""


@pytest.mark.usefixtures("session_config")
def test_a_failure_in_java_is_one_line_of_what_failed_and_why():
    from py4j.protocol import Py4JJavaError

    class Failed(Py4JJavaError):
        def __init__(self):
            pass

        def __str__(self):
            return JAVA

    line = r"Task failed while writing rows to file:/small/part-0\.json: No space left on device$"
    with (
        pytest.raises(ConfigurationError, match=line),
        job("tierlog replay", master=None, conf=None),
    ):
        raise Failed


@pytest.mark.usefixtures("session_config")
def test_sigterm_ends_a_command_on_spark_at_once():
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with job("tierlog stats", master=None, conf=None):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("command", [["stats", "t"], ["replay", "t", "--to-json", "folder"]])
def test_a_missing_source_is_reported_before_spark_starts(session_config, capsys, command):
    assert run_command(command) == 2
    assert "give --store URL, or --server URL" in capsys.readouterr().err
    assert not session_config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--from-time", "soon"), "--from-time: "),
        (("--to-time", "soon"), "--to-time: "),
        (("--from-time", "1h", "--to-time", "1d"), "is later than --to-time"),
    ],
)
def test_a_time_that_is_none_is_refused_by_its_options_name(capsys, given, message):
    assert run_command(["stats", "t", "--store", "file:///a", *given]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert "option" not in said


@pytest.mark.parametrize("targets", [[], ["--to-json", "a", "--to-parquet", "b"]])
def test_a_replay_has_one_target(capsys, targets):
    assert run_command(["replay", "t", "--store", "file:///a", *targets]) == 2
    assert "tierlog: give exactly one of --to-parquet, --to" in capsys.readouterr().err


@pytest.mark.usefixtures("session_config")
@pytest.mark.parametrize(("given", "step_bytes"), [("4k", 4000), ("4KiB", 4096), (None, 4 << 30)])
def test_the_size_of_a_step_is_read_as_a_setting_is(monkeypatch, given, step_bytes):
    from tierlog.spark_reader.jobs.replay import ReplayReport

    asked = {}

    def replay(session, rows, target, **named):
        asked.update(named)
        return ReplayReport(target="b", steps=0, records=0, total_records=0)

    monkeypatch.setattr("tierlog.spark_reader.jobs.replay.replay", replay)
    more = () if given is None else ("--step-bytes", given)
    assert run_command(["replay", "t", "--store", "file:///a", "--to-json", "b", *more]) == 0
    assert asked["step_bytes"] == step_bytes


@pytest.mark.parametrize("given", ["0", "-1k", "much"])
def test_a_step_that_is_no_size_is_refused_before_spark_starts(session_config, capsys, given):
    command = ["replay", "t", "--store", "file:///a", "--to-json", "b", f"--step-bytes={given}"]
    assert run_command(command) == 2
    assert f"--step-bytes: '{given}' is" in capsys.readouterr().err
    assert not session_config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--from-offset", "5", "--to-offset", "3"), "--from-offset (5) is above --to-offset (3)"),
        (("--from-offset", "5", "--from-time", "1h"), "give either --from-time or --from-offset"),
        (("--to-time", "1h", "--to-offset", "0"), "give either --to-time or --to-offset"),
    ],
)
def test_bounds_that_contradict_are_refused_before_spark_starts(
    session_config, capsys, given, message
):
    command = ["replay", "t", "--store", "file:///a", "--to-json", "b", "--partition", "0", *given]
    assert run_command(command) == 2
    assert message in capsys.readouterr().err
    assert not session_config


def test_statistics_are_printed_even_if_their_picture_cannot_be_written(
    session_config, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("tierlog.spark_reader.jobs.stats.stats", lambda *_, **__: [])
    picture = tmp_path / "missing" / "t.svg"
    assert run_command(["stats", "t", "--store", "file:///a", "--picture", str(picture)]) == 1
    printed = capsys.readouterr()
    assert printed.out == '{"topic":"t","hours":[]}\n'
    assert f"{picture}: No such file or directory" in printed.err
