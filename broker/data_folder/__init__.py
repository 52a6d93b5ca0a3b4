"""A data folder: its files, and what they record of topics and of the bucket. Not the logs."""
