"""Calls that carry no records: on topics, partitions and groups, verification, operations."""
