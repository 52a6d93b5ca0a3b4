"""Spark Connect: a session without a local JVM, in its own process, since PySpark allows only
one kind of session in each.
"""

import json
import sys

import pytest

from tests.fakes.spark_process import run_python

pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")

CHILD = """
import json, sys
from importlib.util import find_spec
from pyspark.sql import SparkSession
from pyspark_tierlog import register
from tierlog.spark_reader.jobs.stats import stats
from tierlog.spark_reader.jobs.verify import verify

source = json.loads(sys.argv[1])
sink = {"server": source["server"], "topic": "copy"}
settings = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.ui.enabled": "false"}
settings["spark.sql.shuffle.partitions"] = "1"
builder = SparkSession.builder.remote("local[2]")
for name, value in settings.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
assert type(session).__module__.startswith("pyspark.sql.connect")
register(session)
rows = session.read.format("tierlog").options(**source).load()
some = rows.where("partition = 1 and offset >= 1490").select("offset").collect()
rows.selectExpr("key", "value").write.format("tierlog").mode("append").options(**sink).save()
report = {"rows": sorted(row.offset for row in some)}
report["stats"] = sum(hour.records for hour in stats(session, source))
report["problems"] = len(verify(session, source, clock=lambda: 0).problems)
if find_spec("pyspark.sql.streaming.datasource"):
    stream = session.readStream.format("tierlog").options(**source)
    stream = stream.option("startingOffsets", "earliest").load().select("key", "value")
    stream = stream.writeStream.format("tierlog").options(**sink)
    stream = stream.option("checkpointLocation", "checkpoint").trigger(availableNow=True).start()
    stream.awaitTermination()
    report["stream"] = json.loads(stream.lastProgress.sources[0].endOffset)
session.stop()
print(json.dumps(report))
"""


@pytest.mark.spark
@pytest.mark.soak
def test_everything_but_replay_works_over_spark_connect(tiers, tmp_path):
    tiers.create("copy", partitions=2)
    source = {"store": tiers.store_url, "server": tiers.url, "subscribe": "flights"}
    (report,) = run_python(
        CHILD,
        json.dumps(source),
        cwd=tmp_path,
        PYSPARK_PYTHON=sys.executable,
        SPARK_TESTING="1",  # makes PySpark choose a free port
    )
    streamed = report.pop("stream", None)
    assert report == {"rows": list(range(1490, 1600)), "stats": 4800, "problems": 0}
    if streamed:
        assert streamed["flights"]["offsets"] == dict.fromkeys("012", 1600)
    copies = [tiers.broker.partition("copy", p).offsets().high_watermark for p in range(2)]
    assert sum(copies) == (9600 if streamed else 4800)
