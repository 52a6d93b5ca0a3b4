"""One partition's log on local disk. It stands on `host` and `record_format`.

Start with `log` and `sealed_segments`, the interface that the broker uses. A write goes through
`group_commit`, `log_writer` and `active_segment`; a read through `log_reader` and `segment_lookup`.
The table in `recovery` says what opening a log does after a stop or a crash. Compaction starts in
`cleaner`.
"""
