"""Topics in other libraries' terms: a thin file for each, over `tierlog.dataset` and with its
arguments. Of tierlog's own, only `tierlog.scan_polars` leads to one.
"""
