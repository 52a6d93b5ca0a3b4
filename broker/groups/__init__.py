"""Consumer group offsets, stored as Kafka does: `groups`, on top of `offset_log` and `view`."""
