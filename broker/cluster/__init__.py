"""Several brokers on one prefix: which partitions each leads, how they move, and topics that all of
them know.
"""
