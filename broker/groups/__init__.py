"""How far each group has read, as Kafka keeps it: `groups` first, over `offset_log` and `view`."""
