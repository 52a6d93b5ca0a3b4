"""For bad days: `verify` says what is wrong, `repair` plans and mends, `restore` makes a data
folder from the bucket alone.
"""
