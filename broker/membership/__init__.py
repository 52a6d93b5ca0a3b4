"""The brokers of the cluster as this one knows them: `own_node` and `members` say who lives,
`leaders` who leads what, and `peers` is how they are spoken with.
"""
