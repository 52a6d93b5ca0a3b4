"""The operations that a client is authorized for, as the bits that Kafka's answers carry."""

from __future__ import annotations

from typing import Final

from tierlog.api.kafka.calls import Call
from tierlog.api.serving.grants import Scope

UNASKED: Final = -(2**31)
READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = 3, 4, 5, 6, 7, 8
CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = 9, 10, 11, 12
_OF_TOPIC: Final = {
    Scope.READ: (READ, DESCRIBE, DESCRIBE_CONFIGS),
    Scope.PRODUCE: (WRITE, DESCRIBE, DESCRIBE_CONFIGS),
    Scope.ADMIN: (READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS),
}
_OF_CLUSTER: Final = {
    Scope.READ: (DESCRIBE, DESCRIBE_CONFIGS),
    Scope.PRODUCE: (DESCRIBE, DESCRIBE_CONFIGS, IDEMPOTENT_WRITE),
    Scope.ADMIN: (
        CREATE,
        ALTER,
        DESCRIBE,
        CLUSTER_ACTION,
        DESCRIBE_CONFIGS,
        ALTER_CONFIGS,
        IDEMPOTENT_WRITE,
    ),
}
_OF_GROUP: Final = {
    Scope.READ: (READ, DESCRIBE),
    Scope.ADMIN: (READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS),
}


def operations_of_topic(call: Call, name: str) -> int:
    return _bits(call, _OF_TOPIC) if call.session.grant.sees_topic(name) else 0


def operations_of_cluster(call: Call) -> int:
    return _bits(call, _OF_CLUSTER)


def operations_of_group(call: Call) -> int:
    return _bits(call, _OF_GROUP)


def _bits(call: Call, table: dict[Scope, tuple[int, ...]]) -> int:
    scopes = call.session.grant.scopes
    return sum({1 << one for scope in scopes for one in table.get(scope, ())})
