"""Calls that carry no records: on topics, partitions and groups, and for operators."""
