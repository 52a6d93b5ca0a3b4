"""The PySpark source and sink, and the same read without Spark. Needs none of the broker's code.

Read `splits` (pure) and `planner` first, then `split_reader`, which runs in the tasks. Spark calls
`batch_source`, `stream_source` and `sink`; `options` defines the options of the source.
"""
