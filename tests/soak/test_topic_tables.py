"""Runs of `sync`, four at once, that are killed at random: each record is a row once."""

import os
import random
import signal
import time
from itertools import count

import pytest

pytest.importorskip("pyiceberg")

from tests.fakes.soak import MINUTES, soak_seed
from tests.fakes.topic_tables import SEGMENTS, TopicTable, check_each_once, runs_of

KILLS = 200


@pytest.mark.soak
def test_a_table_has_each_record_once_however_its_writers_end(tmp_path):
    dice, kills, end = random.Random(soak_seed()), 0, time.monotonic() + MINUTES * 60
    for number in count():
        table = TopicTable(tmp_path / f"{number}")
        table.folder.mkdir()
        table.put(0, 1)
        table.create()
        with runs_of(table.folder) as runs:
            for segment in range(1, SEGMENTS + 1):
                writers = [
                    runs.start(killed_at=dice.choice((0, dice.randrange(1, 30)))) for _ in "1234"
                ]
                for pid in writers:
                    if dice.random() < 0.5:
                        time.sleep(dice.random())
                        os.kill(pid, signal.SIGKILL)
                kills += sum(runs.wait(pid) == -signal.SIGKILL for pid in writers)
                check_each_once_so_far(table)
                if segment < SEGMENTS:
                    table.put(segment, segment + 1)
        table.run()
        check_each_once(table)
        if kills >= KILLS or time.monotonic() > end:
            break
    print(kills, "kills")


def check_each_once_so_far(table):
    offsets = table.rows()["offset"].to_pylist()
    assert offsets == list(range(len(offsets)))
