"""What replication decides, without a partition or another broker: `in_sync` is the leader's side
and `term` keeps it, `election` says who becomes one, `write_ahead` has the bucket as a member.
`docs/cluster.md` has the protocol.
"""
