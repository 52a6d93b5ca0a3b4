"""What is refused, and why, by API: for docs/reference/kafka.md.

An API that has a handler is served, in all versions of `APIS`; every other has its reason here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TRANSACTIONS: Final = (
    "No transaction can be begun; those that Kafka wrote are honoured by `read_committed`."
)
_NEW_GROUPS: Final = "Groups have the classic protocol: `group.protocol=classic`, the default."
_SHARE_GROUPS: Final = "There are no share groups."

NOT_SERVED: Final[Mapping[str, str]] = {
    "AddPartitionsToTxn": _TRANSACTIONS,
    "AddOffsetsToTxn": _TRANSACTIONS,
    "EndTxn": _TRANSACTIONS,
    "WriteTxnMarkers": "Markers come from other brokers: there is one.",
    "TxnOffsetCommit": _TRANSACTIONS,
    "AlterClientQuotas": "All clients have the rate that the broker's settings say.",
    "AlterUserScramCredentials": "Tokens are made and revoked by `tierlog token`.",
    "ConsumerGroupHeartbeat": _NEW_GROUPS,
    "ConsumerGroupDescribe": _NEW_GROUPS,
    "ShareGroupHeartbeat": _SHARE_GROUPS,
    "ShareGroupDescribe": _SHARE_GROUPS,
    "ShareFetch": _SHARE_GROUPS,
    "ShareAcknowledge": _SHARE_GROUPS,
    "DescribeShareGroupOffsets": _SHARE_GROUPS,
    "AlterShareGroupOffsets": _SHARE_GROUPS,
    "DeleteShareGroupOffsets": _SHARE_GROUPS,
}

# What Kafka would do, or what clients may expect, and is refused by an API that is served.
REFUSED: Final[Mapping[str, str]] = {
    "Produce": "Versions below 3, which are advertised for librdkafka, as by Kafka. Batches of a "
    "transaction: `TRANSACTIONAL_ID_AUTHORIZATION_FAILED`.",
    "InitProducerId": "A transactional id: `TRANSACTIONAL_ID_AUTHORIZATION_FAILED`.",
    "SaslHandshake": "Version 0, after which tokens come without a request around them.",
    "CreateAcls": "Any: `SECURITY_DISABLED`. Tokens decide: `tierlog token`.",
    "DeleteAcls": "Any: `SECURITY_DISABLED`. Tokens decide: `tierlog token`.",
    "CreateTopics": "A replication factor other than 1 or -1: `INVALID_REPLICATION_FACTOR`.",
    "DeleteRecords": "A topic that is compacted only: `POLICY_VIOLATION`.",
    "AlterConfigs": "A broker's settings, which are read when it starts: `INVALID_REQUEST`.",
    "IncrementalAlterConfigs": "As AlterConfigs.",
    "AlterReplicaLogDirs": "Any folder but the broker's: `LOG_DIR_NOT_FOUND`.",
    "DescribeLogDirs": "Sizes are of the local log: the answer has no place for the bucket's.",
    "ElectLeaders": "The one broker leads each partition: `ELECTION_NOT_NEEDED`.",
    "AlterPartitionReassignments": "Any broker but this: `INVALID_REPLICA_ASSIGNMENT`.",
    "DescribeClientQuotas": "There are none by user or client: the answer is empty.",
    "DescribeQuorum": "One voter, with a log that is always empty.",
    "ListTransactions": "There are none: the answer is empty.",
    "DescribeTransactions": "There are none: `TRANSACTIONAL_ID_NOT_FOUND`.",
}
