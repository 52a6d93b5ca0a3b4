"""What clients may not do to internal topics, through any door. Raises Forbidden."""

from __future__ import annotations

from collections.abc import Mapping

from tierlog.broker.topic_registry import INTERNAL_PREFIX
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.errors import Forbidden
from tierlog.record_format.topic_rules import ConfigValue


def check_may_create(name: str) -> None:
    """No client could produce to it, or delete it."""
    if name.startswith(INTERNAL_PREFIX):
        raise Forbidden(f"{name!r}: names that begin with {INTERNAL_PREFIX} are reserved")


def check_may_delete(name: str) -> None:
    if name.startswith(INTERNAL_PREFIX):
        raise Forbidden(f"{name} is internal: clients cannot delete it")


def check_may_alter(
    name: str, *, config: Mapping[str, ConfigValue | None], partitions: int | None
) -> None:
    """Nothing that would lose the groups' committed offsets."""
    if name != CONSUMER_OFFSETS:
        return
    if partitions is not None:
        raise Forbidden(f"{name}: partitions cannot be added, since groups are found by their hash")
    if config.get("cleanup.policy", "compact") != "compact":
        raise Forbidden(f"{name}: cleanup.policy has to be compact, or offsets would expire")
    for key in ("retention.ms", "retention.bytes"):  # adopted from Kafka, it is not compacted
        if str(config.get(key, -1)) != "-1":
            raise Forbidden(f"{name}: {key} has to be -1, or offsets would expire")
