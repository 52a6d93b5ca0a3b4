"""Formats on disk and on the wire: record batches, indexes, checkpoints, sealed JSON. Also the
error tree and `FileSlice`. Imports no other room.

Read `batch`, `encode` and `decode` first, then `produced` (validation of what clients send) and
`record_walk`. Modules named `native_…` and `…_kernel` are compiled counterparts of plain ones.
"""
