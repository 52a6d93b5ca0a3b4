import pytest

from tierlog.hot_tier.log_config import KEYS, LONG_MAX, LogConfig
from tierlog.record_format.errors import InvalidConfig


def test_defaults_match_the_key_table():
    config = LogConfig.parse({})
    assert config.effective() == {key.name: key.default for key in KEYS}
    assert config.overrides == {}


def test_every_default_parses_and_every_key_has_a_doc_line():
    for key in KEYS:
        assert key.parse(key.default) == key.default
        assert (
            key.parse(str(key.default).lower() if key.kind == "boolean" else str(key.default))
            == key.default
        )
        assert key.doc.endswith(".")


def test_kafkas_text_forms_are_parsed():
    config = LogConfig.parse(
        {
            "segment.bytes": "1024",
            "preallocate": "TRUE",
            "min.cleanable.dirty.ratio": "0.1",
            "cleanup.policy": "compact, delete",
        }
    )
    assert (config.segment_bytes, config.preallocate, config.min_cleanable_dirty_ratio) == (
        1024,
        True,
        0.1,
    )
    assert config.cleanup_policy == "compact,delete"
    assert config.compacts
    assert config.deletes
    assert config.overrides == {
        "segment.bytes": 1024,
        "preallocate": True,
        "min.cleanable.dirty.ratio": 0.1,
        "cleanup.policy": "compact,delete",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("segment.bytes", 1023),
        ("segment.bytes", 2**31),
        ("segment.bytes", "1_024"),
        ("segment.bytes", "1k"),
        ("segment.bytes", True),
        ("segment.bytes", 1024.5),
        ("segment.bytes", None),
        ("segment.bytes", [1024]),
        ("segment.ms", 0),
        ("segment.ms", LONG_MAX + 1),
        ("retention.ms", -2),
        ("local.retention.ms", -3),
        ("preallocate", 1),
        ("preallocate", "yes"),
        ("cleanup.policy", ""),
        ("cleanup.policy", "delete,delete"),
        ("cleanup.policy", "none"),
        ("compression.type", "none"),
        ("min.cleanable.dirty.ratio", 1.01),
        ("min.cleanable.dirty.ratio", "nan"),
        ("segment.ms", float("inf")),
        ("no.such.key", 1),
    ],
)
def test_a_bad_value_is_rejected_by_name(key, value):
    with pytest.raises(InvalidConfig) as refusal:
        LogConfig.parse({key: value})
    assert key in str(refusal.value)
    assert refusal.value.problems[0].loc == f"config.{key}"


def test_all_bad_keys_are_named_at_once():
    with pytest.raises(InvalidConfig) as refusal:
        LogConfig.parse({"segment.bytes": 1, "x": 1})
    assert [p.loc for p in refusal.value.problems] == ["config.segment.bytes", "config.x"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"local.retention.ms": 11, "retention.ms": 10},
        {"local.retention.ms": -1},
        {"local.retention.bytes": 11, "retention.bytes": 10},
        {"local.retention.bytes": -1, "retention.bytes": 10},
        {"min.compaction.lag.ms": 11, "max.compaction.lag.ms": 10},
    ],
)
def test_conflicting_values_are_rejected(overrides):
    with pytest.raises(InvalidConfig, match="must not be more than"):
        LogConfig.parse(overrides)


def test_an_unlimited_local_retention_is_explained():
    with pytest.raises(InvalidConfig, match=r"local.retention.ms \(-1, no limit\) must not be"):
        LogConfig.parse({"retention.ms": 1000, "local.retention.ms": -1})


def test_none_restores_a_default():
    config = LogConfig.parse({"segment.bytes": 2048, "flush.ms": 5})
    altered = config.replace({"segment.bytes": None, "retention.ms": -1})
    assert altered.overrides == {"flush.ms": 5, "retention.ms": -1}
    with pytest.raises(InvalidConfig, match="nope"):
        config.replace({"nope": None})


def test_local_retention_follows_the_total_by_default():
    config = LogConfig.parse({"retention.ms": 5, "retention.bytes": 7})
    assert (config.effective_local_retention_ms, config.effective_local_retention_bytes) == (5, 7)
    narrowed = config.replace({"local.retention.ms": 0, "local.retention.bytes": 1})
    assert (narrowed.effective_local_retention_ms, narrowed.effective_local_retention_bytes) == (
        0,
        1,
    )


def test_two_replicas_have_to_be_in_sync_unless_there_is_one_or_the_topic_says_otherwise() -> None:
    assert [LogConfig.parse({}).min_in_sync(factor) for factor in (1, 2, 3)] == [1, 2, 2]
    chosen = LogConfig.parse({"min.insync.replicas": "3"})
    assert chosen.min_in_sync(3) == 3
    assert chosen.effective(replication_factor=3)["min.insync.replicas"] == 3
    assert LogConfig.parse({}).effective(replication_factor=3)["min.insync.replicas"] == 2
