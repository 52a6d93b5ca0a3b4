"""The front doors: `protocol`, an HTTP/1.1 connection; `http`, the calls; `console`, a page; `app`
puts them together.
"""
