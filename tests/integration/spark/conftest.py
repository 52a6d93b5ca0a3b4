import os
from pathlib import Path

import pytest

from tests.fakes import spark_process
from tests.fakes.two_tiers import two_tiers
from tierlog.spark_reader.environment import prepare

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiers(tmp_path_factory):
    """Topic `flights`: three partitions, most of them cold, the rest hot."""
    with two_tiers(tmp_path_factory.mktemp("tiers")) as tiers:
        tiers.create("flights")
        tiers.produce("flights", 1500)
        tiers.offload("flights")
        tiers.produce("flights", 100)  # less than a segment, so that it stays hot
        yield tiers


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One session for all tests: it takes eight seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        environment = spark_process.environment()
        prepare(environment)
        for name, value in environment.items():
            patch.setenv(name, value)
        from pyspark.sql import SparkSession

        session = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        yield session
        session.stop()
