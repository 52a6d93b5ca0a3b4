"""Each example runs as its page prints it, in a folder with its files and a broker of its own."""

import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.command_line import ROOT, Program, RunningBroker
from tests.fakes.page_blocks import Shell, blocks_of
from tests.fakes.waiting import until
from tierlog.spark_reader.environment import ensure_java

EXAMPLES = ROOT / "examples"


@contextmanager
def example(name: str, tmp_path: Path):
    """Yields a shell, and what its `run` blocks are."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    running = RunningBroker("dev", "--port", "0", cwd=folder)
    try:
        scripts = [script for kind, script in blocks_of(folder / "README.md") if kind == "run"]
        yield Shell(folder, running.server), scripts
    finally:
        assert running.stop() == 0


def at_a_free_port(script: str, port: str, unused_tcp_port: int) -> str:
    assert port in script
    return script.replace(port, str(unused_tcp_port))


def test_every_example_is_listed():
    listed = re.findall(r"\]\(([\w-]+)/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(page.parent.name for page in EXAMPLES.glob("*/README.md"))


def test_a_web_servers_log_is_tailed_and_queried(tmp_path, unused_tcp_port):
    with example("web-logs", tmp_path) as (shell, (tail, query)):
        shell.run("run", at_a_free_port(tail, "8099", unused_tcp_port))
        assert "404 /missing 2\n" in shell.run("run", query)


def test_a_compacted_topic_is_a_table(tmp_path):
    with example("upserts", tmp_path) as (shell, (update, count)):
        assert "99 articles out of " in (first := shell.run("run", update))
        assert first.endswith("article-6: 4906 left; article-7: None\n")
        until(lambda: int(shell.run("run", count)) < 5_001)
        again = shell.run("run", "python table.py")
        assert again.splitlines()[1] == first.splitlines()[-1]


# Two sessions of its own; tests/integration/spark/test_stream.py restarts a stream in a shared one.
@pytest.mark.soak
@pytest.mark.spark
def test_a_spark_stream_that_was_killed_goes_on(tmp_path):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    with example("spark-stream", tmp_path) as (shell, (stream,)):
        java = str(ensure_java(dict(os.environ)))
        ran = shell.run("run", stream, JAVA_HOME=java, SPARK_LOCAL_IP="127.0.0.1")
        assert "killed\n" in ran
        assert ran.endswith("3000 rows, 3000 different\n")


def test_a_day_is_replayed_into_a_notebook_and_plotted(tmp_path):
    pytest.importorskip("matplotlib", reason="the notebook plots with matplotlib")
    with example("notebook", tmp_path) as (shell, (load,)):
        assert "12222 flights" in shell.run("run", load)
        notebook = json.loads((shell.folder / "a-day.ipynb").read_text())
        cells = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
        code = "\n".join((*cells, "print(by_hour.sum().to_dict())"))
        ran = shell.run("python", code, MPLBACKEND="Agg", SOURCE_DATE_EPOCH="0")
        assert ran == "{'departed': 458, 'cancelled': 472}\n"
        assert "<svg" in (shell.folder / "a-day.svg").read_text()


def test_a_web_service_writes_and_follows_a_topic(tmp_path, unused_tcp_port):
    with example("fastapi-service", tmp_path) as (shell, (serve,)):
        ran = shell.run("run", at_a_free_port(serve, "8098", unused_tcp_port))
        assert ran.count('"offset":') == 3
        assert ran.endswith('{"anna":9.5}\n')
        assert Program(shell.server).ok("consume", "orders").count(b"tea") == 3
