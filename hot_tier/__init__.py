"""One partition's log on local disk. Imports only `record_format`.

Read `log` first, and `sealed_segments`: they are what the broker sees. A write goes through
`group_commit`, `appender`, `active_segment` and `flusher`, a read through `log_reader` and
`segment_lookup`. What startup does after a stop or a crash is the table in `opening`; compaction
begins at `cleaner`.
"""
