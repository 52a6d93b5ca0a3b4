"""Appending records: `calls` first, then `head` (all that does not need the body), `columns` and
`repeated_members` (JSON), `partitioner`, `batches`, `append`.
"""
