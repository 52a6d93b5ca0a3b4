"""Calls that carry no records: on topics and partitions, and for operators."""
