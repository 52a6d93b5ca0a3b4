"""The operations that a client is authorized for, as the bits that Kafka's answers carry."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from tierlog.api.kafka.calls import Call
from tierlog.api.serving.grants import Scope

UNASKED: Final = -(2**31)


class Operation(IntEnum):
    """As in org.apache.kafka.common.acl.AclOperation."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


_DESCRIBING: Final = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
_CHANGING: Final = (Operation.CREATE, Operation.ALTER, Operation.ALTER_CONFIGS)
_Table = Mapping[Scope, tuple[Operation, ...]]
_OF_TOPIC: Final[_Table] = {
    Scope.READ: (Operation.READ, *_DESCRIBING),
    Scope.PRODUCE: (Operation.WRITE, *_DESCRIBING),
    Scope.ADMIN: (
        Operation.READ,
        Operation.WRITE,
        Operation.DELETE,
        *_CHANGING,
        *_DESCRIBING,
    ),
}
_OF_CLUSTER: Final[_Table] = {
    Scope.READ: _DESCRIBING,
    Scope.PRODUCE: (*_DESCRIBING, Operation.IDEMPOTENT_WRITE),
    Scope.CLUSTER: (Operation.CLUSTER_ACTION,),
    Scope.ADMIN: (
        Operation.CLUSTER_ACTION,
        Operation.IDEMPOTENT_WRITE,
        *_CHANGING,
        *_DESCRIBING,
    ),
}
_OF_GROUP: Final[_Table] = {
    Scope.READ: (Operation.READ, Operation.DESCRIBE),
    Scope.ADMIN: (Operation.READ, Operation.DESCRIBE, Operation.DELETE),
}


def operations_of_topic(call: Call, name: str) -> int:
    return _bits(call, _OF_TOPIC) if call.session.grant.sees_topic(name) else 0


def operations_of_cluster(call: Call) -> int:
    return _bits(call, _OF_CLUSTER)


def operations_of_group(call: Call) -> int:
    return _bits(call, _OF_GROUP)


def _bits(call: Call, table: _Table) -> int:
    scopes = call.session.grant.scopes
    return sum({1 << one for scope in scopes for one in table.get(scope, ())})
