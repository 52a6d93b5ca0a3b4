"""Appends with acks=all from several threads and prints each acknowledgement, until it is killed.

Run as `python appending_child.py FOLDER`; prints `offset value` once that is flushed.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fakes.clock import Clock
from tests.fakes.partition_logs import TOPIC_ID, batch, produced
from tierlog.hot_tier.group_commit import FlushTimer, GroupCommit
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Acks, Append
from tierlog.hot_tier.recovery_scan import OpenRequest

log = PartitionLog.open(
    Path(sys.argv[1]),
    topic="t",
    partition=0,
    topic_id=TOPIC_ID,
    config=LogConfig.parse({"segment.bytes": 20_000, "index.interval.bytes": 500}),
    clock=Clock(),
    request=OpenRequest(clean=False),
)
commits = GroupCommit(log.writer, ThreadPoolExecutor(4).submit, FlushTimer())
print_lock = threading.Lock()


def produce(name: int) -> None:
    number = 0
    while True:
        value = b"%d-%d-%d" % (log.flushed_end, name, number)
        append = Append(produced(batch([value + b"." * (number % 200)])))
        result = commits.submit(append, acks=Acks.ALL).result()
        with print_lock:
            print(result.base_offset, value.decode(), flush=True)
        number += 1


for name in range(6):
    threading.Thread(target=produce, args=(name,)).start()
threading.Event().wait()  # the executor ends with the main thread
