"""The decisions of replication, pure: `in_sync` is the leader's side, `election` who becomes one,
`write_ahead` the bucket as a member. `docs/cluster.md` has the protocol that they are of.
"""
