"""The bytes: batches, indexes, checkpoints, sealed JSON; errors; `FileSlice`. Imports no other
room.

Read `batch`, `encode` and `decode` first, then `produced` (the gate for what clients send) and
`record_walk`. Modules named `native_…` and `…_kernel` are the compiled twins of a plain one.
"""
