"""A topic as an Iceberg table, by PyIceberg: each committed record is one row of it, once.

* Which records a table has is its `position`, set by the same commit as their files.
* A commit is sent once, and holds only if the table is what it was when its position was read.
  Whatever came of it is known by reading the table again.
"""
