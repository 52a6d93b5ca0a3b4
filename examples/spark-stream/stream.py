"""A topic into Parquet files, 500 records a step; may be killed and started again at any time."""

import argparse
import os
import pathlib
import signal
import time

import pyspark_tierlog

pyspark_tierlog.prepare()  # before the session: finds a Java for it

from pyspark.sql import SparkSession  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--die-after", type=int, default=0, help="be killed after so many steps")
die_after = parser.parse_args().die_after

spark = SparkSession.builder.master("local[2]").getOrCreate()
query = (
    spark.readStream.format("tierlog")
    .option("server", os.environ.get("TIERLOG_SERVER", "http://127.0.0.1:8640"))
    .option("store", pathlib.Path(".tierlog/bucket").absolute().as_uri())
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 500)
    .load()
    .selectExpr("partition", "offset", "cast(value as string) value")
    .writeStream.format("parquet")
    .option("path", "orders")
    .option("checkpointLocation", "checkpoint")
    .trigger(availableNow=True)  # ends where the topic ended at its start
    .start()
)
while query.isActive:
    done = query.lastProgress
    if die_after and done and done["batchId"] + 1 >= die_after:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
query.awaitTermination()  # raises what stopped it

rows = spark.read.parquet("orders")
print(rows.count(), "rows,", rows.select("partition", "offset").distinct().count(), "different")
