"""Several brokers on one prefix: who they are, which partitions each leads, and topics that all of
them know.
"""
