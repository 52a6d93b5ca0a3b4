"""An example of each response for the OpenAPI document, by the name of its type.

A test checks that each matches its schema, and that none is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_TOPIC_ID: Final = "Yh2uZyKKT5aFcGuNgd3XWA"
_OWNER: Final = "2af2d330872d96663d53340610f6c4b9"
_FIRST_MS, _LAST_MS = 1795860000000, 1795946340000
_SEGMENTS: Final = f"topics/flights/{_TOPIC_ID}/0/segments/"
_OBJECT: Final = f"prefix/{_SEGMENTS}{0:020}-1-8f4f1f2cb8d0a1c2e3f4"
_OFFSETS: Final = {
    "log_start_offset": 0,
    "local_log_start_offset": 107338,
    "high_watermark": 336776,
    "log_end_offset": 336776,
    "leader_epoch": 1,
}
_SEGMENT: Final = {
    "base_offset": 0,
    "last_offset": 107337,
    "size_bytes": 16777180,
    "records": 107338,
    "min_timestamp": _FIRST_MS,
    "max_timestamp": _LAST_MS,
    "object_key": f"{_OBJECT}.log",
    "crc32c": "8f890588",
}
_RECORD: Final = {
    "offset": 336774,
    "timestamp": _FIRST_MS,
    "key": "N14228",
    "value": '{"carrier": "UA", "delay": 2}',
    "headers": [{"name": "source", "value": "tower"}],
}
_TRANSACTIONAL_PRODUCER: Final = {
    "transactional_id": "etl",
    "producer_id": 3543849216634336,
    "producer_epoch": 4,
}
_MEMBER_ID: Final = "http-7c0ff3a5-2f4c-4d0f-9a57-1b1fd4a9a1de"
_ASSIGNMENT: Final = [{"topic": "flights", "partitions": [0, 1, 2]}]
_GROUP_OFFSET: Final = {
    "topic": "flights",
    "partition": 0,
    "offset": 336000,
    "log_end_offset": 336776,
    "lag": 776,
    "metadata": "",
}

_SCHEMA_TEXT: Final = (
    '{"type":"record","name":"Flight","fields":[{"name":"carrier","type":"string"}]}'
)
_TOPIC: Final = {
    "name": "flights",
    "topic_id": _TOPIC_ID,
    "config": {"retention.ms": -1},
    "effective_config": {"retention.ms": -1, "segment.bytes": 1073741824},
    "partitions": [
        {
            "partition": 0,
            **_OFFSETS,
            "hot_bytes": 35860480,
            "cold_bytes": 16777180,
            "cold_end_offset": 315120,
            "segments": 3,
            "offload_lag_bytes": 2306048,
            "leader": {"node_id": 0, "url": "http://127.0.0.1:8640"},
        }
    ],
}
LINE: Final = json.dumps({"partition": 0, **_RECORD}) + "\n"
EVENT: Final = f"id: {_RECORD['offset']}\ndata: {LINE}\n"

MERGED_SEGMENT: Final = {
    "base_offset": 0,
    "last_offset": 107337,
    "size_bytes": 16777180,
    "record_count": 107338,
    "min_timestamp": _FIRST_MS,
    "max_timestamp": _LAST_MS,
    "leader_epoch": 1,
    "log_key": f"{_SEGMENTS}{0:020}-1-8f4f1f2cb8d0a1c2e3f4.log",
    "log_crc32c": 2717908992,
    "indexes_key": f"{_SEGMENTS}{0:020}-1-8f4f1f2cb8d0a1c2e3f4.indexes",
    "indexes_crc32c": 305419896,
    "indexes_size_bytes": 135120,
    "chunk_table_position": 92,
    "chunk_table_size": 164,
    "modified_ms": _LAST_MS,
}

EXAMPLES: Final[Mapping[str, Any]] = {
    "TopicList": {
        "topics": [
            {
                "name": "flights",
                "topic_id": _TOPIC_ID,
                "partitions": 3,
                "config": {"retention.ms": -1},
            }
        ]
    },
    "TopicState": _TOPIC,
    "AlteredTopic": _TOPIC,
    "FetchedPartition": {
        "topic": "flights",
        "partition": 0,
        "records": [_RECORD],
        "next_offset": 336775,
        "log_start_offset": 0,
        "high_watermark": 336776,
        "tier": "hot",
    },
    "FetchError": {
        "topic": "flights",
        "partition": 9,
        "error": {
            "type": "urn:tierlog:problem:unknown-partition",
            "title": "No such partition",
            "status": 404,
            "detail": "topic 'flights' has no partition 9",
            "code": "unknown-partition",
        },
    },
    "Produced": {
        "topic": "flights",
        "results": [
            {
                "partition": 0,
                "base_offset": 336774,
                "last_offset": 336775,
                "records": 2,
                "log_append_time": None,
                "duplicate": False,
            }
        ],
        "warnings": [],
    },
    "Accepted": {"topic": "flights", "accepted": 2},
    "ProducerIdentity": {"producer_id": 3543849216634336, "producer_epoch": 0},
    "TransactionalProducer": _TRANSACTIONAL_PRODUCER,
    "TransactionList": {
        "transactions": [
            {**_TRANSACTIONAL_PRODUCER, "state": "Ongoing", "age_ms": 1200, "partitions": 2}
        ],
        "next_after": None,
    },
    "TransactionState": {
        **_TRANSACTIONAL_PRODUCER,
        "state": "Ongoing",
        "timeout_ms": 60000,
        "age_ms": 1200,
        "partitions": [
            {"topic": "__consumer_offsets", "partitions": [0]},
            {"topic": "flights", "partitions": [1]},
        ],
    },
    "OffsetsState": {**_OFFSETS, "last_stable_offset": 336776},
    "OffsetAtTime": {"offset": 107338, "timestamp": _LAST_MS},
    "SegmentList": {
        "segments": [{**_SEGMENT, "tier": "cold", "active": False}],
        "next_from_offset": 107338,
    },
    "ManifestState": {
        "topic": "flights",
        "topic_id": _TOPIC_ID,
        "partition": 0,
        "version": 7,
        "created_ms": _LAST_MS,
        "leader_epoch": 1,
        "owner": _OWNER,
        "log_start_offset": 0,
        "end_offset": 107338,
        "epochs": [{"leader_epoch": 1, "base_offset": 0, "owner": _OWNER}],
        "gaps": [],
        "segments": [
            {
                **_SEGMENT,
                "leader_epoch": 1,
                "indexes_key": f"{_OBJECT}.indexes",
                "indexes_crc32c": "146e8e3d",
                "indexes_size_bytes": 66112,
            }
        ],
        "next_from_offset": None,
    },
    "PinList": {
        "topic": "flights",
        "pins": [
            {
                "name": "june",
                "partition": 0,
                "version": 12,
                "created_ms": 1372899607000,
                "expires_ms": None,
            }
        ],
    },
    "Trimmed": {"log_start_offset": 1000},
    "Offloaded": {"uploaded_segments": 2, "uploaded_bytes": 19083228, "remaining_segments": 0},
    "Merged": {
        "merged_segments": 1008,
        "new_segments": 1,
        "merged_bytes": 48211968,
        "remaining_segments": 0,
    },
    "MergePlan": {
        "runs": [],
        "segments_folder": _SEGMENTS,
        "leader_epoch": 1,
        "index_interval_bytes": 4096,
        "filters_keys": True,
        "chunk_bytes": 8388608,
        "reads_back": False,
    },
    "VerifyReport": {
        "ok": False,
        "checked": {
            "partitions": 3,
            "pages": 0,
            "segments": 9,
            "objects": 18,
            "chunks": 27,
            "records": 336776,
            "local_segments": 3,
            "read_bytes": 52637660,
        },
        "problems": [
            {
                "kind": "object-missing",
                "partition": 0,
                "object_key": f"{_OBJECT}.log",
                "detail": "the manifest names it, and it is not there",
            }
        ],
        "problems_left_out": 0,
    },
    "RepairReport": {
        "topic": "flights",
        "applied": False,
        "running": ["collect", "make-indexes", "set-aside", "upload-again", "write-topic"],
        "steps": [
            {
                "action": "upload-again",
                "partition": 0,
                "detail": "object-missing: the local log has the same bytes",
                "object_key": f"{_OBJECT}.log",
                "base_offset": 0,
                "last_offset": 107337,
            }
        ],
    },
    "GroupState": {
        "group": "reports",
        "offsets": [_GROUP_OFFSET],
        "state": "Stable",
        "generation": 1,
        "protocol_type": "consumer",
        "members": [
            {
                "member_id": _MEMBER_ID,
                "instance_id": None,
                "client_id": "http",
                "client_host": "http",
                "assignment": _ASSIGNMENT,
            }
        ],
        "type": "classic",
    },
    "Membership": {"member_id": _MEMBER_ID, "generation": 1, "assignment": _ASSIGNMENT},
    "GroupList": {
        "groups": [
            {
                "group": "reports",
                "topics": ["flights"],
                "partitions": 3,
                "lag": 776,
                "state": "Stable",
                "members": 1,
                "type": "classic",
            }
        ]
    },
    "Alive": {"status": "alive"},
    "Ready": {
        "ready": True,
        "reasons": [],
        "degraded": ["store unavailable: connection refused"],
    },
    "StorageReport": {
        "store": "s3://bucket/prefix",
        "hot_segments": 6,
        "cold_segments": 4,
        "hot_bytes": 35860480,
        "cold_bytes": 16777180,
        "offload_lag_bytes": 2306048,
        "offload_lag_ms": 4200,
        "topics": [
            {
                "topic": "flights",
                "partitions": 3,
                "segments": 9,
                "hot_segments": 6,
                "cold_segments": 4,
                "hot_bytes": 35860480,
                "cold_bytes": 16777180,
                "offload_lag_bytes": 2306048,
                "offload_lag_segments": 1,
                "offload_lag_ms": 4200,
            }
        ],
        "cache": {
            "chunks": 2,
            "cached_bytes": 16777180,
            "reserved_bytes": 0,
            "lingering_bytes": 0,
            "limit_bytes": 10737418240,
            "hits": 120,
            "misses": 2,
            "evicted_chunks": 0,
        },
        "store_requests": [
            {
                "purpose": "offload",
                "operation": "put",
                "requests": 18,
                "failures": 0,
                "sent_bytes": 16843292,
                "received_bytes": 0,
                "cost_dollars": 0.00009,
            }
        ],
        "cost_dollars": 0.00009,
        "diverged": [],
    },
    "ClusterState": {
        "cluster_id": "hD4xJx7vT6m0sZzq3xkq5Q",
        "node_id": 0,
        "brokers": [
            {
                "node_id": 2,
                "folder_id": _OWNER,
                "url": "http://broker-2:8640",
                "kafka": "broker-2:9092",
                "zone": "eu-1b",
                "state": "running",
                "incarnation": 3,
                "is_alive": True,
                "leads": 4,
                "replicas": 12,
            }
        ],
        "offline_partitions": 0,
        "under_replicated_partitions": 1,
        "under_min_isr_partitions": 0,
    },
    "LeaderReport": {"node_id": 2, "leaders": [[_TOPIC_ID, 0, 1, 336776, 336000]]},
    "PlannedMoves": {
        "moves": [{"topic": "flights", "partition": 0, "source": 0, "target": 2}],
        "left": 0,
    },
    "Reassigned": {"leader": 2, "replicas": [2, 0, 1], "adding": [2], "removing": [1]},
    "OngoingReassignments": {
        "reassignments": [
            {
                "topic": "flights",
                "partition": 0,
                "replicas": [2, 0, 1],
                "adding": [2],
                "removing": [1],
            }
        ]
    },
    "RegisteredId": {"id": 1, "version": 1, "guid": "4a44cc9a-4ce8-3a9a-d6f8-3e88190092c5"},
    "SchemaOfId": {"schema": _SCHEMA_TEXT},
    "VersionOfSubject": {
        "subject": "flights-value",
        "version": 1,
        "id": 1,
        "schema": _SCHEMA_TEXT,
    },
    "Compatible": {"is_compatible": True},
    "GivenLevel": {"compatibility": "FULL"},
    "KeptLevel": {"compatibilityLevel": "BACKWARD"},
    "Mode": {"mode": "READWRITE"},
    "MovedLeader": {"node_id": 2, "end_offset": 336776, "paused_ms": 140},
}
