"""Kafka's error codes, and which of them an error of ours is.

* The numbers are those of Kafka's protocol guide ("Error Codes").
* A client retries, resets or gives up by the code, so an API answers only with codes that Kafka's
  own broker may answer there: where the table's would be another, the handler says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache
from typing import Final, NamedTuple

import msgspec

from tierlog.record_format import errors
from tierlog.record_format.kafka_messages.definitions import Struct, definition


class Code(IntEnum):
    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    INCONSISTENT_TOPIC_ID = 103
    UNKNOWN_TOPIC_ID = 100
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    SHARE_SESSION_LIMIT_REACHED = 133
    INVALID_REGULAR_EXPRESSION = 128


_NAMES: Final = {code.value: code.name for code in Code}

# The most derived class that is in here counts.
_CODES: Final[Mapping[type[Exception], Code]] = {
    errors.UnknownTopicOrPartition: Code.UNKNOWN_TOPIC_OR_PARTITION,
    errors.OffsetOutOfRange: Code.OFFSET_OUT_OF_RANGE,
    errors.InvalidBatch: Code.INVALID_RECORD,
    errors.DamagedBatch: Code.CORRUPT_MESSAGE,
    errors.InvalidRecord: Code.INVALID_RECORD,
    errors.InvalidTimestamp: Code.INVALID_TIMESTAMP,
    errors.RecordTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.RequestTooLarge: Code.MESSAGE_TOO_LARGE,
    errors.TooManyRecords: Code.RECORD_LIST_TOO_LARGE,
    errors.OutOfOrderSequence: Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
    errors.ProducerFenced: Code.INVALID_PRODUCER_EPOCH,
    errors.Forbidden: Code.TOPIC_AUTHORIZATION_FAILED,
    errors.TopicExists: Code.TOPIC_ALREADY_EXISTS,
    errors.InvalidTopicName: Code.INVALID_TOPIC_EXCEPTION,
    errors.InvalidPartitionCount: Code.INVALID_PARTITIONS,
    errors.InvalidReplicationFactor: Code.INVALID_REPLICATION_FACTOR,
    errors.InvalidReplicaAssignment: Code.INVALID_REPLICA_ASSIGNMENT,
    errors.InvalidConfig: Code.INVALID_CONFIG,
    errors.NoReassignment: Code.NO_REASSIGNMENT_IN_PROGRESS,
    errors.UnknownGroup: Code.GROUP_ID_NOT_FOUND,
    errors.RequestError: Code.INVALID_REQUEST,
    errors.FencedError: Code.NOT_LEADER_OR_FOLLOWER,
    errors.NotLeader: Code.NOT_LEADER_OR_FOLLOWER,
    errors.LeaderUnknown: Code.NOT_LEADER_OR_FOLLOWER,
    errors.LeaderChanged: Code.NOT_LEADER_OR_FOLLOWER,
    errors.NotEnoughReplicas: Code.NOT_ENOUGH_REPLICAS,
    errors.NotReplicated: Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    errors.WatermarkUnknown: Code.OFFSET_NOT_AVAILABLE,
    errors.ShuttingDown: Code.NOT_LEADER_OR_FOLLOWER,
    errors.RetriableError: Code.KAFKA_STORAGE_ERROR,
    errors.LogOfflineError: Code.KAFKA_STORAGE_ERROR,
    errors.CorruptDataError: Code.KAFKA_STORAGE_ERROR,
    errors.OutcomeUnknownError: Code.KAFKA_STORAGE_ERROR,
    OSError: Code.KAFKA_STORAGE_ERROR,
}


class Refused(errors.RequestError):
    """Answered with this code."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(detail or code.name)
        self.code = code


def text_of(error: BaseException | None) -> str | None:
    """What the client did wrong, in words. Other texts may name local files: None."""
    return str(error) if isinstance(error, errors.RequestError) else None


def code_of(error: BaseException) -> Code:
    """UNKNOWN_SERVER_ERROR for what is not in the table."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, errors.GroupRefused | errors.TransactionRefused):
        return Code[error.reason]
    for kind in type(error).__mro__:
        if (code := _CODES.get(kind)) is not None:
            return code
    return Code.UNKNOWN_SERVER_ERROR


class _Places(NamedTuple):
    """Where a struct has error codes: its fields, and by the names of others what they hold."""

    here: tuple[str, ...]
    inside: tuple[tuple[str, _Places], ...]


@cache
def _places_in(answer: type[msgspec.Struct]) -> _Places:
    return _places(definition(answer.__name__).struct)


def _places(struct: Struct) -> _Places:
    found = ((one.name, _places(one.struct)) for one in struct.fields if one.struct is not None)
    inside = tuple((name, places) for name, places in found if any(places))
    here = tuple(one.name for one in struct.fields if one.name.endswith("error_code"))
    return _Places(here, inside)


def names_of_errors(answer: msgspec.Struct | None) -> list[str]:
    """Each error in an answer once, also those of its topics and partitions; NONE if there is no
    error in it.
    """
    codes: set[int] = set()
    if answer is not None:
        _collect([answer], _places_in(type(answer)), codes)
    return [_NAMES.get(code, "other") for code in codes - {0}] or ["NONE"]


def _collect(rows: Iterable[object], places: _Places, codes: set[int]) -> None:
    for name in places.here:
        codes.update([getattr(row, name) for row in rows])
    for name, inside in places.inside:
        for row in rows:
            value = getattr(row, name)
            if value:
                _collect(value if isinstance(value, list) else [value], inside, codes)
