import pytest

from tierlog.api.console.record_filter import RecordFilter, parse_header, parse_json_test
from tierlog.record_format.decode import Columns
from tierlog.record_format.errors import InvalidRequest

RECORD = (
    b'{"carrier":"UA","delay":30,"late":true,"none":null,"day":"2013-07-04",'
    b'"legs":[{"to":"IAH","delay":2},{"to":"MIA","delay":45}],"odd name":{"x-y":[[1],[2]]}}'
)


@pytest.mark.parametrize(
    "holds",
    [
        "$.carrier",
        "carrier",
        "$.none",
        "carrier = UA",
        'carrier == "UA"',
        "carrier != AA",
        "delay = 30",
        "delay = 30.0",
        "delay >= 30",
        "delay<31",
        "late = true",
        "none = null",
        "day > 2013-07-03",
        "$.legs[0].to = IAH",
        "$.legs[*].to = MIA",
        "$.legs[*].delay > 40",
        "$['odd name'].x-y[1][0] = 2",
        '$["odd name"]["x-y"][*][*] = 1',
    ],
)
def test_a_path_finds_a_value(holds: str) -> None:
    assert parse_json_test(holds).holds(RECORD)


@pytest.mark.parametrize(
    "fails",
    [
        "$.nothing",
        "$.carrier.x",
        "$.legs[2]",
        "$.legs.to",
        "carrier = ua",
        "delay > 30",
        "delay > x",
        "late = 1",
        "delay = true",
        "none = 0",
        "carrier < 5",  # as text
        "$.legs[*].delay > 45",
    ],
)
def test_a_path_that_is_not_there_or_differs_does_not_hold(fails: str) -> None:
    assert not parse_json_test(fails).holds(RECORD)


@pytest.mark.parametrize("data", [None, b"", b"plain", b"[1,", b"\xff{}", b"[" * 100_000])
def test_what_is_not_json_does_not_hold(data: bytes | None) -> None:
    assert not parse_json_test("$.a").holds(data)


@pytest.mark.parametrize("text", ["$", " ", "= 3", "a b", "$.a[x]", "a[", "a..b", "$.a[-1]"])
def test_a_path_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_json_test(text)


def columns(*records: tuple[int, bytes | None, bytes | None, tuple]) -> Columns:
    times, keys, values, headers = map(list, zip(*records, strict=True))
    return Columns(list(range(len(times))), times, keys, values, headers)


COLUMNS = columns(
    (5, b"a", b'{"n":1}', ()),
    (6, b"ab", None, (("kind", b"late"),)),
    (9, None, b"plain text", (("kind", None),)),
)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (RecordFilter(), [0, 1, 2]),
        (RecordFilter(key=b"a"), [0]),
        (RecordFilter(text=b"a"), [0, 1, 2]),
        (RecordFilter(text=b"late"), [1]),
        (RecordFilter(text=b"Late"), []),
        (RecordFilter(header=parse_header("kind")), [1, 2]),
        (RecordFilter(header=parse_header("kind = late")), [1]),
        (RecordFilter(header=parse_header("kin")), []),
        (RecordFilter(times=(6, 9)), [1]),
        (RecordFilter(json=parse_json_test("n = 1")), [0]),
        (RecordFilter(text=b"a", key=b"ab", header=("kind", None), times=(0, 7)), [1]),
    ],
)
def test_every_condition_that_is_given_must_hold(wanted: RecordFilter, rows: list[int]) -> None:
    assert wanted.rows(COLUMNS) == rows


@pytest.mark.parametrize(
    ("times", "found"),
    [((0, 10), False), ((0, 11), True), ((21, 30), False), ((20, 21), True)],
)
def test_a_segment_outside_of_the_times_is_not_read(times: tuple[int, int], found: bool) -> None:
    wanted = RecordFilter(times=times)
    assert wanted.could_hold(10, 20) is found
    assert wanted.could_hold(None, None)
    assert RecordFilter().could_hold(10, 20)
