"""What clients may not do to internal topics, through any door. Raises Forbidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierlog.broker.data_folder.topic_registry import INTERNAL_PREFIX
from tierlog.broker.group_coordinator.group_configs import TOPIC as GROUP_CONFIGS
from tierlog.broker.share_coordinator.share_groups import TOPIC as SHARE_GROUP_STATE
from tierlog.broker.transaction_coordinator.transactions import TOPIC as TRANSACTION_STATE
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.errors import Forbidden
from tierlog.record_format.schema_records import TOPIC as SCHEMAS
from tierlog.record_format.topic_rules import ConfigValue


def check_may_create(name: str) -> None:
    """No client could produce to it, or delete it."""
    if name.startswith(INTERNAL_PREFIX):
        raise Forbidden(f"{name!r}: names that begin with {INTERNAL_PREFIX} are reserved")


def check_may_delete(name: str) -> None:
    if _is_internal(name):
        raise Forbidden(f"{name} is internal: clients cannot delete it")


def check_may_trim(name: str) -> None:
    if _is_internal(name):
        raise Forbidden(f"{name} is internal: clients cannot trim it")


def _is_internal(name: str) -> bool:
    """Also what another registry, as a client, may produce to: records name the ids in it."""
    return name.startswith(INTERNAL_PREFIX) or name == SCHEMAS


def check_may_alter(
    name: str, *, config: Mapping[str, ConfigValue | None], partitions: int | None
) -> None:
    """Nothing that would lose the groups' committed offsets, or what became of a transaction."""
    kept = _KEPT.get(name)
    if kept is None:
        return
    if partitions is not None:
        raise Forbidden(f"{name}: partitions cannot be added, since {kept} are found by a hash")
    policy = "delete" if name == SHARE_GROUP_STATE else "compact"
    if config.get("cleanup.policy", policy) != policy:
        raise Forbidden(f"{name}: cleanup.policy has to be {policy}, or {kept} would be lost")
    for key in ("retention.ms", "retention.bytes"):  # adopted from Kafka, it is not compacted
        if str(config.get(key, -1)) != "-1":
            raise Forbidden(f"{name}: {key} has to be -1, or {kept} would expire")


_KEPT: Final = {
    CONSUMER_OFFSETS: "offsets",
    TRANSACTION_STATE: "transactions",
    SHARE_GROUP_STATE: "what share groups did",
    GROUP_CONFIGS: "configurations of groups",
    SCHEMAS: "schemas",
}
