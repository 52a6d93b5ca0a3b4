"""Appending records. Read `handlers` first, then `columns` and `repeated_members` (JSON), and
`append`.
"""
