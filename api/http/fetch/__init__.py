"""Reading records. Read `single` first, the fetch from one partition.

`positions` resolves where a reader starts, `reading` reads the log, `long_poll` waits on
`watermarks`, `record_json` encodes records as text, and `shared_pages` does so once for all readers
at the end of a log. `many` fetches from many partitions, `tail` streams, and `segments` serves a
segment's bytes.
"""
