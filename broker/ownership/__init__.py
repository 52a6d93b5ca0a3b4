"""Who may write a partition: `ownership` claims it in the bucket, and `fence_checker` checks that
the claim still holds.

`take_over` takes a partition over from another data folder, as `take_over_plan` decides;
`allocated_epochs` holds the leader epochs that this folder allocated to its logs.
"""
