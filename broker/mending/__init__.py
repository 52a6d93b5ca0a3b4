"""For bad days: `verify` says what is wrong, `repair` plans and mends, `restore` makes a folder out
of the bucket alone.
"""
