"""What a log's files hold, in the words of Kafka's own DumpLogSegments."""
