"""The two tiers as one log, what moves between them, and who has which part of it.

Start with `broker`, then `partition`, whose tiers nobody else sees. A room stands on rooms below:

| room                      | what is in it                                                       |
|---------------------------|---------------------------------------------------------------------|
| `background`              | work that nobody waits for: uploads, retention, compaction, merges  |
| `cluster`                 | which broker has which partitions, how they move; topics of all     |
| `replicas`                | this broker's replicas: opened, followed, led                       |
| `schema_registry`         | schemas by Confluent's API                                          |
| `transaction_coordinator` | Kafka's coordinators: each its state machines, and the topic that   |
| `share_coordinator`       | keeps what they decide                                              |
| `group_coordinator`       |                                                                     |
| `membership`              | the other brokers: who lives, who leads what, how to speak to them  |
| `topics`                  | the topics that are served, and those that coordinators write       |
| `opening`                 | from a folder on disk to a log that is served                       |
| `partition`               | one partition over both tiers: reads, writes, upkeep                |
| `bucket`                  | the bucket: is it usable, whose is a partition, its cold log        |
| `replication`             | what a term of leadership decides; it knows no partition            |
| `data_folder`             | what a data folder records, beside the logs                         |
"""
