"""Share groups (KIP-932): who has which records of a partition, and what of that is durable.
`share_groups` keeps it in `__share_group_state`.
"""
