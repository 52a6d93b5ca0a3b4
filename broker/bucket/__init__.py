"""The bucket: whether it can be used, whose a partition is there, and its cold log.

`bucket` gives each partition its `cold_log`; nothing is written before `store_status` has verified
the prefix and `ownership` the owner.
"""
