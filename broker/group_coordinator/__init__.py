"""Groups whose members share partitions, and the offsets that they commit: state machines that are
pure, the coordinator that runs them, and `groups`, which keeps it all in `__consumer_offsets`.
"""
