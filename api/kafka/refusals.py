"""What is refused, and why, by API: for docs/reference/kafka.md.

An API that has a handler is served, in all versions of `APIS`; every other has its reason here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NOT_SERVED: Final[Mapping[str, str]] = {
    "AlterClientQuotas": "All principals have one rate, `http.client.requests.max`, which is read "
    "when the broker starts: a quota of one of them would be forgotten, or not be kept to.",
    "AlterUserScramCredentials": "A credential is part of a token, made when its secret is known "
    "(`tierlog token create`). A salted password has no scopes, and is nothing that PLAIN, "
    "OAUTHBEARER or HTTP could check.",
}

# What Kafka would do, or what clients may expect, and is refused by an API that is served.
REFUSED: Final[Mapping[str, str]] = {
    "Produce": "Versions below 3, which are advertised for librdkafka, as by Kafka.",
    "InitProducerId": "Version 6, of two-phase commit (KIP-939), which Kafka calls unstable.",
    "ConsumerGroupHeartbeat": "A pattern that RE2 does not know, or of more than 4,096 characters: "
    "`INVALID_REGULAR_EXPRESSION`.",
    "SaslHandshake": "Version 0, after which tokens come without a request around them.",
    "CreateAcls": "Any: `SECURITY_DISABLED`. Tokens decide: `tierlog token`.",
    "DeleteAcls": "Any: `SECURITY_DISABLED`. Tokens decide: `tierlog token`.",
    "CreateTopics": "More replicas than there are brokers: `INVALID_REPLICATION_FACTOR`.",
    "DeleteRecords": "A topic that is compacted only: `POLICY_VIOLATION`.",
    "AlterConfigs": "A broker's settings, which are read when it starts: `INVALID_REQUEST`.",
    "IncrementalAlterConfigs": "As AlterConfigs. A group's `streams.*` keys, which streams groups "
    "have: `INVALID_CONFIG`, as any unknown name.",
    "ShareFetch": "`MinBytes` is not waited for: the answer comes with the first records.",
    "AlterReplicaLogDirs": "Any folder but the broker's: `LOG_DIR_NOT_FOUND`.",
    "DescribeLogDirs": "Sizes are of the local log: the answer has no place for the bucket's.",
    "ElectLeaders": "Where a partition has one replica, that leads it: `ELECTION_NOT_NEEDED`, or, "
    "while its broker is down, `PREFERRED_LEADER_NOT_AVAILABLE`. No election is unclean: "
    "`POLICY_VIOLATION`.",
    "AlterPartitionReassignments": "Several replicas instead of one, or one instead of several: "
    "`INVALID_REPLICA_ASSIGNMENT`. The only replica is handed over.",
    "DescribeClientQuotas": "There are none by user or client: the answer is empty.",
    "DescribeQuorum": "One voter, with a log that is always empty.",
}
