"""Settings in words: what is shown can be typed, and nothing but the meaning reaches the broker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.hot_tier.config_words import from_words, in_words
from tierlog.hot_tier.log_config import KEYS, LONG_MAX, LogConfig

NUMBERS = [key for key in KEYS if key.kind in {"int", "long"}]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("retention.ms", 604_800_000, "7 d"),
        ("retention.ms", -1, "unlimited"),
        ("retention.bytes", 5_000_000, "5 MB"),
        ("local.retention.ms", -2, "as retention.ms"),
        ("segment.bytes", 65_536, "64 KiB"),
        ("segment.bytes", 1_048_588, "1048588 B"),
        ("offload.max.lag.ms", -1, "never"),
        ("cold.merge.min.bytes", -1, "never"),
        ("flush.messages", LONG_MAX, "unlimited"),
        ("flush.messages", 100, "100"),
        ("segment.ms", 5_400_000, "90 min"),
        ("segment.jitter.ms", 0, "0 ms"),
        ("preallocate", True, "true"),
        ("cleanup.policy", "compact", "compact"),
        ("a.newer.brokers.key", 7, "7"),
    ],
)
def test_a_value_is_shown_in_words(name, value, words):
    assert in_words(name, value) == words


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("retention.ms", "7d", 604_800_000),
        ("retention.ms", "604800000", 604_800_000),
        ("retention.ms", str(LONG_MAX), LONG_MAX),
        ("retention.ms", "1.5h", 5_400_000),
        ("retention.ms", "Unlimited", -1),
        ("max.compaction.lag.ms", "unlimited", LONG_MAX),
        ("segment.bytes", "64k", 64_000),
        ("segment.bytes", "64KiB", 65_536),
        ("local.retention.bytes", "as  retention.bytes", -2),
        ("cleanup.policy", "compact", "compact"),
        ("a.newer.brokers.key", "7d", "7d"),
    ],
)
def test_words_become_kafkas_numbers(name, text, value):
    assert from_words(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("retention.ms", "a week", "a duration, as in 90s, 12h or 7d"),
        ("retention.ms", "7MB", "or unlimited"),
        ("segment.bytes", "7d", "a size, as in 64KiB or 1GB"),
        ("segment.bytes", "unlimited", "a size"),
        ("flush.messages", "7d", "a whole number or unlimited"),
    ],
)
def test_other_text_is_refused_with_what_is_expected(name, text, expected):
    with pytest.raises(ValueError, match=expected):
        from_words(name, text)


@given(st.sampled_from(NUMBERS), st.data())
def test_what_is_shown_can_be_given_back(key, data):
    value = data.draw(st.integers(key.minimum, key.maximum - 1))  # the largest is -1, too
    assert from_words(key.name, in_words(key.name, value)) == value


def test_every_default_survives_its_words():
    typed = {key.name: from_words(key.name, in_words(key.name, key.default)) for key in KEYS}
    assert LogConfig.parse(typed).effective() == LogConfig.parse({}).effective()
