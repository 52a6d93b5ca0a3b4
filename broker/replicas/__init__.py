"""The replicas of this broker: `replicas` opens, follows and leads them as `elections` finds, and
answers those that follow. What is right is `replication`'s to decide.
"""
