"""Reading records: `nowait` if nothing has to be waited for, otherwise `one`.

`positions` says where a reader starts, `reading` how the log is read, `long_poll` waits on
`watermarks`, `record_json` writes records as text, and `shared_pages` does so once for everybody at
the end of a log. `many` is the same for many partitions, `tail` the same without an end; `segments`
gives a segment's bytes.
"""
