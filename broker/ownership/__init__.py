"""Who may write a partition: `ownership` claims it in the bucket, `fences` checks whether that
still holds.

`take_over` takes it from another folder, as `parting_plan` decides; `taken_epochs` are the leader
epochs that this folder gave its logs.
"""
