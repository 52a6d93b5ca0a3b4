"""The decision what a take-over does with a local log."""

import pytest

from tierlog.broker.opening.take_over import LocalLog, TakeOverPlan, plan_take_over
from tierlog.manifest.state import EpochStart, Manifest, OffsetGap


def manifest(*, end, epochs, gaps=()):
    return Manifest(
        topic="t",
        topic_id="id",
        partition=0,
        version=1,
        nonce="n",
        created_ms=0,
        owner=epochs[-1].owner,
        leader_epoch=epochs[-1].epoch,
        epochs=tuple(epochs),
        log_start_offset=0,
        end_offset=end,
        gaps=tuple(OffsetGap(*gap) for gap in gaps),
    )


def local_log(history, ranges, end_offset):
    recorded = frozenset((start.owner, start.epoch) for start in history)
    return LocalLog(history, recorded, ranges, end_offset)


A1, A2, B3 = EpochStart(1, 0, "a"), EpochStart(2, 100, "a"), EpochStart(3, 100, "b")
B3_LATER = EpochStart(3, 130, "b")
NOTHING = TakeOverPlan()


@pytest.mark.parametrize(
    ("local", "remote", "gap", "expected"),
    [
        pytest.param(
            local_log((A1, A2), ((0, 80), (80, 120)), 120),
            manifest(end=80, epochs=[A1]),
            0,
            NOTHING,
            id="the bucket is a prefix of the local log, ending with a segment",
        ),
        pytest.param(
            local_log((A1, A2), ((0, 80), (80, 120)), 120),
            manifest(end=100, epochs=[A1]),
            0,
            TakeOverPlan(None, None, 100),
            id="the bucket is a prefix of the local log, ending within a segment",
        ),
        pytest.param(
            local_log((A1, A2), ((0, 100), (100, 120)), 120),
            manifest(end=150, epochs=[A1, B3]),
            0,
            TakeOverPlan(100, 150, None),
            id="another owner wrote from 100 on, as we did",
        ),
        pytest.param(
            local_log((A1,), ((0, 100), (100, 160)), 160),
            manifest(end=100, epochs=[A1, B3_LATER]),
            0,
            TakeOverPlan(130, None, None),
            id="our records that another owner copied and did not upload are kept",
        ),
        pytest.param(
            local_log((A1,), ((0, 90),), 90),
            manifest(end=150, epochs=[A1, B3]),
            0,
            TakeOverPlan(None, 150, None),
            id="we only lag behind the bucket",
        ),
        pytest.param(
            local_log((A1,), ((0, 100), (100, 120)), 120),
            manifest(end=1100, epochs=[A1, EpochStart(3, 1100, "b")], gaps=[(100, 1100)]),
            0,
            TakeOverPlan(100, 1100, None),
            id="a restore skipped offsets that we wrote",
        ),
        pytest.param(
            local_log((A1, EpochStart(3, 1100, "a")), ((1100, 1120),), 1120),
            manifest(end=1110, epochs=[A1, EpochStart(3, 1100, "a")], gaps=[(100, 1100)]),
            0,
            TakeOverPlan(split_at=1110),
            id="our records right above a gap are kept",
        ),
        pytest.param(
            local_log((), (), 0),
            manifest(end=100, epochs=[A1]),
            1000,
            TakeOverPlan(None, 1100, None),
            id="a restore leaves a gap",
        ),
        pytest.param(
            local_log((A1,), ((100, 120),), 120),
            manifest(end=110, epochs=[A1, EpochStart(4, 120, "a")]),
            1000,
            TakeOverPlan(split_at=110, resume_at=1120),
            id="a tail whose folder was written to after it was taken",
        ),
        pytest.param(
            local_log((A1, EpochStart(3, 80, "a")), ((80, 100),), 100)._replace(
                recorded=frozenset({("a", 2)})
            ),
            manifest(end=80, epochs=[A1, EpochStart(2, 80, "a")]),
            0,
            NOTHING,
            id="the current epoch is of a restart that wrote nothing",
        ),
        pytest.param(
            local_log((), (), 0),
            None,
            1000,
            TakeOverPlan(None, 1000, None),
            id="nothing was uploaded",
        ),
        pytest.param(
            local_log((A1, A2), ((0, 100), (100, 120)), 120),
            manifest(end=150, epochs=[A1, B3]),
            1000,
            TakeOverPlan(100, 1150, None),
            id="another owner wrote from 100 on, and perhaps past 150",
        ),
        pytest.param(
            local_log((A1,), ((0, 100), (100, 160)), 160),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(diverged_from=130, resume_at=1130),
            id="our records that another owner copied are uploaded first",
        ),
        pytest.param(
            local_log((A1,), ((0, 90), (90, 130)), 130),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(split_at=100, resume_at=1130),
            id="our records that another owner copied begin within a segment",
        ),
        pytest.param(
            local_log((A1,), ((0, 100),), 100),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(start_at=1130),
            id="another owner wrote past the bucket's end",
        ),
        pytest.param(
            local_log((A1,), (), 1130),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(start_at=1130),
            id="a failed attempt had already emptied the log",
        ),
        pytest.param(
            local_log((A1,), ((110, 130),), 130)._replace(log_start_offset=115),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(resume_at=1130),
            id="trimmed past the bucket's end",
        ),
        pytest.param(
            local_log((A1,), ((110, 130),), 130),
            manifest(end=100, epochs=[A1, B3_LATER]),
            1000,
            TakeOverPlan(diverged_from=100, start_at=1130),
            id="a log that begins above the bucket's end is set aside",
        ),
    ],
)
def test_the_plan_for_a_local_log(local, remote, gap, expected):
    assert plan_take_over(local, remote, gap=gap) == expected
