"""The Kafka listener: Kafka's wire protocol over the same log, for every client that exists.

| file | what it is |
|---|---|
| `listener`, `connection` | the socket; frames in, answers out, in order |
| `calls`, `handlers` | what a handler is given and gives back; the table of all of them |
| `context`, `request_memory`, `settings` | what all handlers share, and their limits |
| `access`, `sasl` | who a client is: by tokens, and how it proves that it has one |
| `acls` | tokens as Kafka's ACLs |
| `error_codes` | Kafka's codes, and which of them an error of ours is |
| `versions`, `metadata` | ApiVersions; Metadata |
| `partitions` | the topics and partitions that a request names |
| `produce`, `producers` | Produce; InitProducerId, DescribeProducers |
| `fetch`, `fetch_sessions` | Fetch, and what it keeps of its clients |
| `log_offsets` | ListOffsets, OffsetForLeaderEpoch |

A broker that does not listen for Kafka clients imports none of it but `settings`.
"""
