"""`verify` finds what is missing or corrupt, `repair` plans and carries out repairs, `restore`
makes a data folder from the bucket alone.
"""
