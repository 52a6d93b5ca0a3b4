"""Appending records: `calls` first, then `head` (all that needs no body), `columns` and
`repeated_members` (JSON), `partitioner`, `batches`, `append`.
"""
