"""What a log's files contain, in the format of Kafka's DumpLogSegments."""
