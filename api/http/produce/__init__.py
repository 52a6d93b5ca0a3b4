"""Appending records. Read `handlers` first, then `head` (everything but the body), `columns` and
`repeated_members` (JSON), `partitioner`, `batches`, `append`.
"""
