"""The client parses times like the broker."""

import pytest

from tierlog.api.http.strict_json import parse_time
from tierlog.client.records import to_ms
from tierlog.record_format.errors import InvalidRequest


@pytest.mark.parametrize(
    "text",
    [
        "1767225600000",
        "2024-02-29T23:59:59.999Z",
        "1970-01-01T00:00:00.5-00:30",
        "2016-12-31T23:59:60Z",
        "2016-12-31t23:59:60.25Z",
        "2016-12-31 15:59:60.5-08:00",
    ],
)
def test_the_client_parses_times_like_the_broker(text):
    assert to_ms(text) == parse_time(text)


@pytest.mark.parametrize(
    "text",
    [
        "2016-12-31T23:58:60Z",
        "2016-12-31T23:59:60-08:00",
        "2016-12-31T23:59:60",
        "2016-12-31T23:60:60Z",
        "9999-12-31T23:59:60Z",
    ],
)
def test_a_leap_second_is_accepted_only_at_the_end_of_a_utc_day(text):
    with pytest.raises(InvalidRequest):
        to_ms(text)
