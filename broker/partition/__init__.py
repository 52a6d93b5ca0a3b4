"""One partition over both tiers. `partition` hides them, `tiered_reads` reads them as one log,
`upkeep` and `compaction` keep them in order.
"""
