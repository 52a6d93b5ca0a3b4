"""Topics in other libraries' terms: a thin file for each, over `tierlog.dataset` and with its
arguments. Nothing else of tierlog's imports them.
"""
