"""Formats on disk and on the wire: record batches, indexes, checkpoints, sealed JSON; and the error
tree. Imports no other room.

Read `batch`, `encode` and `decode` first, then `produced` (validation of what clients send) and
`record_walk`. `compiled` and what imports it (`record_kernel`, `key_kernel`, `arrow_columns`) need
numba.
"""
