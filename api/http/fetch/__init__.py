"""Reading records. Read `single` first, the fetch from one partition.

`reading` has what all readers share, `long_poll` waits, `record_pages` chooses records and
`record_json` encodes them as text, which `shared_pages` does once for all readers at the end of a
log. `many` fetches from many partitions, `tail` streams, and `segments` serves a segment's bytes.
"""
