"""Transactions over all partitions of a broker: each transactional id's state, and its timers.
`transactions` keeps them in `__transaction_state`.
"""
