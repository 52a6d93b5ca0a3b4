"""Calls that move no records: topics, partitions, groups, a check of a topic, the broker itself."""
