import json
from itertools import pairwise

import pytest

from tierlog.record_format.errors import CorruptDataError
from tierlog.spark_reader.jobs.replay import ToFiles, _request
from tierlog.spark_reader.jobs.replay_plan import (
    Position,
    from_json,
    split_into_steps,
    step_options,
)
from tierlog.spark_reader.splits import OffsetRange, PartitionFacts, Split


def offset_range(partition, start, end):
    facts = PartitionFacts(
        topic="t",
        topic_id="id",
        partition=partition,
        log_start_offset=0,
        end_offset=end,
        cold_end_offset=end,
        manifest=None,
    )
    return OffsetRange(facts, start, end)


def splits(partition, *borders):
    return [
        Split(
            topic="t",
            topic_id="id",
            partition=partition,
            start_offset=start,
            end_offset=end,
            size_bytes=0,
        )
        for start, end in pairwise(borders)
    ]


@pytest.mark.parametrize("step_bytes", [1, 100, 200, 350, 10_000])
def test_steps_are_consecutive_and_cover_the_range(step_bytes):
    ranges = [offset_range(0, 5, 1000), offset_range(1, 0, 40), offset_range(2, 7, 7)]
    all_splits = [*splits(0, 5, 200, 410, 600, 790, 1000), *splits(1, 0, 40)]
    steps = split_into_steps(ranges, all_splits, split_bytes=100, step_bytes=step_bytes)
    for number in (0, 1):
        parts = [step["t"][number] for step in steps if number in step["t"]]
        assert parts[0][0] == ranges[number].start_offset
        assert parts[-1][1] == ranges[number].end_offset
        assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert not any(2 in step["t"] for step in steps)
    assert len(steps) <= max(1, -(-600 // step_bytes))


def test_an_empty_range_gives_no_step():
    assert split_into_steps([offset_range(0, 5, 5)], [], split_bytes=100, step_bytes=100) == []


def test_a_position_goes_on_with_each_step_and_round_trips():
    position = Position(asked={"subscribe": "t"})
    for step, files in (({"t": {0: (0, 5), 3: (1, 2)}}, ["date=a/x"]), ({"t": {0: (5, 9)}}, [])):
        position = position.after_step(step, {"t": "id"}, records=6, files=files)
        assert from_json(position.to_json(), file="position.json") == position
        assert position.files == files
    assert (position.steps, position.records) == (2, 12)
    assert position.next_offsets == {"t": {0: 9, 3: 2}}
    newer = position.to_json().replace('"format_version": 1', '"format_version": 2')
    with pytest.raises(CorruptDataError, match="position has format version 2"):
        from_json(newer, file="position.json")
    for broken in ("", "[]", "{}", position.to_json().replace("steps", "step")):
        with pytest.raises(CorruptDataError, match=r"position\.json: is not a replay's position"):
            from_json(broken, file="position.json")


def test_a_step_reads_its_offsets_and_no_other_partitions():
    step = {"t": {0: (0, 5), 3: (1, 2)}}
    assert json.loads(step_options(step, {})["endingOffsets"]) == {"t": {"0": 5, "3": 2}}
    versions = {"manifestVersion": '{"t": {"0": 7, "1": 8}, "u": {"0": 9}}'}
    assert step_options(step, versions)["manifestVersion"] == '{"t": {"0": 7}}'


def test_a_position_has_the_options_that_choose_the_rows_and_no_secret():
    chosen = {"subscribe": "t", "Tier": "cold", "kafka.isolation.level": "read_committed"}
    secret = {"token": "hunter2", "secretAccessKey": "hunter2"}
    secret |= {"kafka.sasl.jaas.config": "hunter2", "fs.s3a.secret.key": "hunter2"}
    asked = _request(chosen | secret, ToFiles(folder="out"))
    assert asked == chosen | {"kind": "parquet", "base64": "false"}
