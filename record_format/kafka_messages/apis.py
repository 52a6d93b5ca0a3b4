"""The APIs of Kafka that this codec speaks: key, name, versions, headers.

* The versions are those that Apache Kafka 4.3.1 serves; a test compares the table with the
  definitions. A version that Kafka calls unstable is left out, as by its brokers.
* It is literal, so that a listener's first answer, ApiVersions, needs no definition but its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

API_VERSIONS: Final = 18


class Api(NamedTuple):
    """One API. From version `flexible_from` on it is flexible; None: it never is."""

    key: int
    name: str
    min_version: int
    max_version: int
    flexible_from: int | None

    @property
    def advertised_min_version(self) -> int:
        """Produce is advertised from 0, for librdkafka, and refused below 3 (KAFKA-18659);
        SaslHandshake from 1: what follows its version 0 is no request.
        """
        return {"Produce": 0, "SaslHandshake": 1}.get(self.name, self.min_version)

    def is_flexible(self, version: int) -> bool:
        return self.flexible_from is not None and version >= self.flexible_from

    def request_header_version(self, version: int) -> int:
        return 2 if self.is_flexible(version) else 1

    def response_header_version(self, version: int) -> int:
        """ApiVersions answers a client that does not know yet what this broker knows: always 0."""
        return 0 if self.key == API_VERSIONS else int(self.is_flexible(version))


APIS: Final[Mapping[int, Api]] = MappingProxyType(
    {
        api.key: api
        for api in (
            Api(0, "Produce", 3, 13, 9),
            Api(1, "Fetch", 4, 18, 12),
            Api(2, "ListOffsets", 1, 11, 6),
            Api(3, "Metadata", 0, 13, 9),
            Api(8, "OffsetCommit", 2, 10, 8),
            Api(9, "OffsetFetch", 1, 10, 6),
            Api(10, "FindCoordinator", 0, 6, 3),
            Api(11, "JoinGroup", 0, 9, 6),
            Api(12, "Heartbeat", 0, 4, 4),
            Api(13, "LeaveGroup", 0, 5, 4),
            Api(14, "SyncGroup", 0, 5, 4),
            Api(15, "DescribeGroups", 0, 6, 5),
            Api(16, "ListGroups", 0, 5, 3),
            Api(17, "SaslHandshake", 0, 1, None),
            Api(18, "ApiVersions", 0, 4, 3),
            Api(19, "CreateTopics", 2, 7, 5),
            Api(20, "DeleteTopics", 1, 6, 4),
            Api(21, "DeleteRecords", 0, 2, 2),
            Api(22, "InitProducerId", 0, 5, 2),
            Api(23, "OffsetForLeaderEpoch", 2, 4, 4),
            Api(24, "AddPartitionsToTxn", 0, 5, 3),
            Api(25, "AddOffsetsToTxn", 0, 4, 3),
            Api(26, "EndTxn", 0, 5, 3),
            Api(27, "WriteTxnMarkers", 1, 2, 1),
            Api(28, "TxnOffsetCommit", 0, 5, 3),
            Api(29, "DescribeAcls", 1, 3, 2),
            Api(30, "CreateAcls", 1, 3, 2),
            Api(31, "DeleteAcls", 1, 3, 2),
            Api(32, "DescribeConfigs", 1, 4, 4),
            Api(33, "AlterConfigs", 0, 2, 2),
            Api(34, "AlterReplicaLogDirs", 1, 2, 2),
            Api(35, "DescribeLogDirs", 1, 5, 2),
            Api(36, "SaslAuthenticate", 0, 2, 2),
            Api(37, "CreatePartitions", 0, 3, 2),
            Api(42, "DeleteGroups", 0, 2, 2),
            Api(43, "ElectLeaders", 0, 2, 2),
            Api(44, "IncrementalAlterConfigs", 0, 1, 1),
            Api(45, "AlterPartitionReassignments", 0, 1, 0),
            Api(46, "ListPartitionReassignments", 0, 0, 0),
            Api(47, "OffsetDelete", 0, 0, None),
            Api(48, "DescribeClientQuotas", 0, 1, 1),
            Api(49, "AlterClientQuotas", 0, 1, 1),
            Api(50, "DescribeUserScramCredentials", 0, 0, 0),
            Api(51, "AlterUserScramCredentials", 0, 0, 0),
            Api(55, "DescribeQuorum", 0, 2, 0),
            Api(60, "DescribeCluster", 0, 2, 0),
            Api(61, "DescribeProducers", 0, 0, 0),
            Api(65, "DescribeTransactions", 0, 0, 0),
            Api(66, "ListTransactions", 0, 2, 0),
            Api(68, "ConsumerGroupHeartbeat", 0, 1, 0),
            Api(69, "ConsumerGroupDescribe", 0, 1, 0),
            Api(74, "ListConfigResources", 0, 1, 0),
            Api(75, "DescribeTopicPartitions", 0, 0, 0),
            Api(76, "ShareGroupHeartbeat", 1, 1, 0),
            Api(77, "ShareGroupDescribe", 1, 1, 0),
            Api(78, "ShareFetch", 1, 2, 0),
            Api(79, "ShareAcknowledge", 1, 2, 0),
            Api(90, "DescribeShareGroupOffsets", 0, 1, 0),
            Api(91, "AlterShareGroupOffsets", 0, 0, 0),
            Api(92, "DeleteShareGroupOffsets", 0, 0, 0),
        )
    }
)


def api_of(key: int) -> Api | None:
    """The API of this key; None if it is not spoken."""
    return APIS.get(key)
