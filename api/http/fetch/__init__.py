"""Reading records: `at_once` where nothing is waited for, else `one`.

`positions` says where a reader starts, `reading` how the log is asked, `long_poll` waits over
`watermarks`, `record_json` writes records as text, `shared_pages` once for all who stand at the
end. `many` and `tail` are the same for many partitions and without an end; `segments` gives a
segment's bytes.
"""
