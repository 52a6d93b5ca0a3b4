import re
from dataclasses import replace

import pytest

from tierlog.record_format.codecs import CODEC_IDS
from tierlog.record_format.errors import InvalidOption
from tierlog.spark_reader.option_values import EARLIEST, LATEST, AtTime
from tierlog.spark_reader.options import _OPTIONS, Use, parse_options, wants_headers
from tierlog.spark_reader.sink import parse_write_options

COLD = {"store": "file:///bucket", "tier": "cold", "subscribe": "flights"}

HUGE = "9" * 5000


def parse(streaming=False, **given):
    return parse_options({**COLD, **given}, streaming=streaming)


def test_option_names_are_case_insensitive():
    options = parse_options(
        {"STORE": "file:///b", "Tier": "cold", "assign": '{"t": [2, 0]}', "SPLITBYTES": "8m"},
        streaming=False,
    )
    assert options.choice.partitions == {"t": (0, 2)}
    assert options.limits.split_bytes == 8 << 20


def test_values_are_parsed_as_kafkas_source_does():
    assert parse(startingOffsets=" Earliest ").starting.default == EARLIEST
    assert parse(startingTimestamp=" 77 ", tier="cold\n").starting.timestamp == 77
    assert wants_headers({"includeHeaders": " true "})
    assert parse(maxTriggerDelay="15M").trigger.max_delay_ms == 15 * 60_000


def test_default_bounds_are_those_of_kafkas_source():
    assert parse().starting.spec_for("flights", 0) == EARLIEST
    assert parse().ending.spec_for("flights", 0) == LATEST
    assert parse(streaming=True).starting.spec_for("flights", 0) == LATEST


def test_timestamps_take_precedence_over_offsets():
    offsets = '{"flights": {"0": 5, "1": -2}}'
    times = '{"flights": {"1": "1970-01-01T00:00:01Z"}}'
    some = parse(startingOffsets=offsets, startingOffsetsByTimestamp=times)
    assert [some.starting.spec_for("flights", p) for p in (0, 1, 2)] == [5, AtTime(1000), EARLIEST]
    every = parse(startingOffsets=offsets, startingOffsetsByTimestamp=times, startingTimestamp="77")
    assert every.starting.spec_for("flights", 0) == AtTime(77)
    # Invalid for a batch, but ignored: options may be shared with a stream.
    assert parse(startingOffsets="latest", startingTimestamp="77").starting.timestamp == 77


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tier": "warm"}, "option tier: 'warm' is not one of all, cold"),
        ({"splitBytes": "0"}, "option splitBytes: '0' is not a size above 0"),
        ({"minPartitions": "-1"}, "option minPartitions: '-1' is not a whole number above 0"),
        ({"failOnDataLoss": "yes"}, "option failOnDataLoss: 'yes' is not one of true, false"),
        ({"isolationLevel": "x"}, "not one of read_uncommitted, read_committed"),
        ({"startingOffsets": "newest"}, "one of earliest, latest, or JSON such as"),
        ({"startingOffsets": "latest"}, "a batch cannot start at the latest"),
        ({"startingOffsets": '{"flights": {"0": -1}}'}, "a batch cannot start at the latest"),
        ({"startingOffsets": '{"flights": {"0": -3}}'}, "option startingOffsets"),
        ({"startingOffsets": '{"flights": {"x": 3}}'}, "option startingOffsets"),
        ({"startingOffsets": '{"flights": 3}'}, "option startingOffsets"),
        ({"startingOffsets": '{"a":' * 100_000}, "option startingOffsets"),
        ({"startingOffsets": f'{{"a": {{"{HUGE}": 1}}}}'}, "option startingOffsets"),
        ({"maxOffsetsPerTrigger": f"{2**63}"}, r"above 0, and below 2\^63"),
        ({"maxOffsetsPerTrigger": HUGE}, "option maxOffsetsPerTrigger"),
        ({"splitBytes": f"{HUGE}m"}, "option splitBytes"),
        ({"maxTriggerDelay": f"{HUGE}m"}, "option maxTriggerDelay"),
        ({"endingOffsets": "earliest"}, "option endingOffsets: 'earliest' is not one of latest"),
        (
            {"endingOffsets": '{"flights": {"0": -2}}'},
            r"-2 \(earliest\) for flights-0 is not allowed",
        ),
        ({"startingTimestamp": "yesterday"}, "is not a time: milliseconds"),
        ({"startingTimestamp": "2013-06-01T12:00:00"}, "is not a time"),
        ({"startingTimestamp": "-1"}, "option startingTimestamp: '-1' is not a time"),
        ({"endingTimestamp": f"{2**63}"}, "option endingTimestamp: '9223372036854775808' is not"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": -2}}'}, "option startingOffsetsByTimestamp"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": true}}'}, "option endingOffsetsByTimestamp"),
        ({"assign": '{"flights": [0]}'}, "not subscribe and assign"),
        ({"subscribePattern": "("}, "option subscribePattern: '\\(' is not a regular expression"),
        ({"subscribePattern": "(" * 10_000}, "option subscribePattern"),
        ({"subscribePattern": "a{99999999999}"}, "option subscribePattern"),
        ({"subscribePattern": "a"}, "not subscribe and subscribePattern"),
        ({"subscribe": " , "}, "option subscribe"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "9 exceeds .* is 8$"),
        ({"maxBytesPerTrigger": "5m"}, "option maxBytesPerTrigger is only for streams"),
        ({"pin": "a", "manifestVersion": '{"flights": {"0": 1}}'}, "exclude each other"),
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets"),
        ({"maxRecords": "5"}, "there is no option 'maxRecords'"),
        ({"path": "s3://x"}, "there is no option 'path'"),
        ({"tokens": "secret-value"}, "did you mean token"),
    ],
)
def test_an_invalid_option_is_refused_with_its_name_and_valid_values(given, message):
    with pytest.raises(InvalidOption, match=message):
        parse(**given)


WRONG = {
    "store": ("gs-user:hunter2@b", "user or a password"),
    "endpoint": ("127.0.0.1:9000", "http://127.0.0.1:9000 or https://host"),
    "region": (" ", "a non-empty text"),
    "pathStyle": ("1", "one of true, false"),
    "accessKeyId": (" ", "invalid value"),
    "secretAccessKey": (" ", "invalid value"),
    "sessionToken": (" ", "invalid value"),
    "server": ("http://me:hunter2@broker:8640", "user or a password"),
    "token": (" ", "invalid value"),
    "tokenFile": ("", "a non-empty text"),
    "caFile": ("", "a non-empty text"),
    "subscribe": (",", "a list of topics, such as topicA,topicB"),
    "subscribePattern": ("*", "a regular expression"),
    "assign": ('{"a": [0, 0]}', 'JSON such as {"topicA": [0, 1]'),
    "startingOffsets": ("first", "one of earliest, latest, or JSON"),
    "endingOffsets": ("first", 'JSON such as {"topic": {"0": 23, "1": -1}} (-1 is the latest)'),
    "startingTimestamp": ("1.5", "milliseconds since the epoch, or ISO 8601"),
    "endingTimestamp": ("now", "milliseconds since the epoch, or ISO 8601"),
    "startingOffsetsByTimestamp": ("7", 'JSON such as {"topic": {"0": 1700000000000'),
    "endingOffsetsByTimestamp": ('{"a": {"0": "noon"}}', 'JSON such as {"topic": {"0":'),
    "startingOffsetsByTimestampStrategy": ("earliest", "one of error, latest"),
    "minPartitions": ("0", "a whole number above 0"),
    "maxRecordsPerPartition": ("1e6", "a whole number above 0"),
    "splitBytes": ("64 mil", "in bytes or with a unit, such as 64m"),
    "maxOffsetsPerTrigger": ("0", "a whole number above 0"),
    "minOffsetsPerTrigger": ("x", "a whole number above 0"),
    "maxTriggerDelay": ("soon", "a duration, such as 30s or 15m"),
    "maxBytesPerTrigger": ("0", "in bytes or with a unit, such as 64m"),
    "failOnDataLoss": ("no", "one of true, false"),
    "includeHeaders": ("yes", "one of true, false"),
    "isolationLevel": ("serializable", "one of read_uncommitted, read_committed"),
    "kafka.isolation.level": ("x", "one of read_uncommitted, read_committed"),
    "tier": ("hot", "one of all, cold"),
    "manifestVersion": ('{"a": {"0": 0}}', 'JSON of manifest versions, such as {"topic": {"0": 12'),
    "pin": ("", "a non-empty text"),
    "singleQuery": ("once", "one of true, false"),
    "keySchema": ("newest", "latest, registry, or the id of a schema"),
    "keyMessage": ("", "a non-empty text"),
    "valueSchema": ("newest", "latest, registry, or the id of a schema"),
    "valueMessage": ("", "a non-empty text"),
    "mode": ("dropmalformed", "one of failfast, permissive"),
}


def test_every_option_has_an_error_with_its_name_and_valid_values():
    assert sorted(WRONG) == sorted(_OPTIONS)
    for name, (value, allowed) in WRONG.items():
        streaming = Use.BATCH not in _OPTIONS[name].uses
        with pytest.raises(
            InvalidOption, match=f"^option {name}: .*{re.escape(allowed)}"
        ) as refused:
            parse(streaming=streaming, **{name: value})
        assert "hunter2" not in str(refused.value)


def test_batches_ignore_the_limits_of_streams_as_kafkas_source_does():
    limits = {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "2", "maxTriggerDelay": "1s"}
    assert parse(**limits) == replace(parse(), trigger=parse(streaming=True, **limits).trigger)


def test_options_of_spark_and_kafka_are_ignored():
    options = {"kafka.bootstrap.servers": "x:9092", "groupIdPrefix": "g", "mergeSchema": "true"}
    assert parse(**options).tier == "cold"


def test_kafkas_isolation_and_compression_options_are_fallbacks():
    committed = {"kafka.isolation.level": "read_committed"}
    assert parse(**committed).isolation == "read_committed"
    assert parse(**committed, isolationLevel="read_uncommitted").isolation == "read_uncommitted"
    to = {"server": "broker:8640", "kafka.compression.type": "zstd"}
    assert parse_write_options(to).codec == CODEC_IDS["zstd"]
    assert parse_write_options({**to, "compression": "none"}).codec == CODEC_IDS["none"]


@pytest.mark.parametrize(
    "parse_none", [lambda: parse_options({}, streaming=False), lambda: parse_write_options({})]
)
def test_without_options_the_error_says_how_a_query_of_a_table_gives_them(parse_none):
    with pytest.raises(InvalidOption, match=r"CREATE TABLE: .* WITH \('server' .* temporary view"):
        parse_none()
    with pytest.raises(InvalidOption, match=r"and assign$"):
        parse_options({"server": "http://127.0.0.1:1"}, streaming=False)


def test_tier_cold_requires_a_store_and_streams_have_no_end():
    with pytest.raises(InvalidOption, match="option store"):
        parse_options({"tier": "cold", "subscribe": "a"}, streaming=False)
    with pytest.raises(InvalidOption, match="option server or store"):
        parse_options({"tier": "all", "subscribe": "a"}, streaming=False)
    with pytest.raises(InvalidOption, match="option endingOffsets is only for batch reads"):
        parse(streaming=True, endingOffsets="latest")


@pytest.mark.parametrize(
    ("starting", "ending"),
    [
        ({"startingOffsets": '{"t": {"0": 1, "1": 8}}'}, {"endingOffsets": '{"t": {"1": 7}}'}),
        ({"startingTimestamp": "8"}, {"endingTimestamp": "7"}),
        ({"startingOffsetsByTimestamp": '{"t": {"1": 8}}'}, {"endingTimestamp": "7"}),
        ({"startingTimestamp": "8"}, {"endingOffsetsByTimestamp": '{"t": {"1": 7}}'}),
    ],
)
def test_a_range_that_starts_after_its_end_is_refused(starting, ending):
    with pytest.raises(
        InvalidOption, match=r"t-1 at (time )?8, after .* at (time )?7$|: 8 is later.* 7$"
    ):
        parse(**starting, **ending)
    for other in ({name: text.replace("7", "8") for name, text in ending.items()}, {}):
        parse(**starting, **other)  # from 8 to 8, and from 8 on
    parse(**starting, endingOffsets='{"t": {"1": -1}}')
    parse(**ending)


def test_secrets_do_not_appear_in_reprs_and_errors():
    secrets = {
        "token": "s3cret-a",
        "secretAccessKey": "s3cret-b",
        "accessKeyId": "s3cret-c",
        "sessionToken": "s3cret-d",
    }
    assert "s3cret" not in repr(parse(**secrets))
    with pytest.raises(InvalidOption) as caught:
        parse(**{**secrets, "token": " "}, tier="warm")
    assert "s3cret" not in str(caught.value)
