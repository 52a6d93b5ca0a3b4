"""Calls of brokers to each other, and those that another broker carries out.

`gateway` passes a call on, `splitting` the parts of one on several partitions; `peers` makes calls
to other brokers, with `replica_connections` for what followers read, and `handlers` and
`replica_fetch` answer them.
"""
