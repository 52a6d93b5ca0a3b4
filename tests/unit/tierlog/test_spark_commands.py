"""What a command on Spark asks of the session that it starts."""

from contextlib import contextmanager
from pathlib import Path
from urllib.request import url2pathname

import pytest

from tierlog.cli.spark_options import job


@pytest.fixture
def asked(monkeypatch):
    pytest.importorskip("pyspark")
    asked = {}

    @contextmanager
    def job_session(name, *, master, config):
        asked.update(config)
        yield

    monkeypatch.setattr("spark_reader.jobs.session.job_session", job_session)
    return asked


def test_sparks_log_goes_nowhere(asked):
    with job("tierlog stats", master=None, conf=None):
        option, file = asked["spark.driver.extraJavaOptions"].split("=")
    assert option == "-Dlog4j2.configurationFile"
    assert "Null" in Path(url2pathname(file.removeprefix("file://"))).read_text()


def test_who_asks_for_sparks_log_gets_it(asked):
    with job("tierlog stats", master=None, conf=["spark.log.level=WARN"]):
        assert asked == {"spark.log.level": "WARN"}
