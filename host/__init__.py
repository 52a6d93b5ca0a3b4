"""What the machine gives: the disk and durable files, open files, the page cache, threads, clocks,
back-off. It knows no format and no partition.
"""
