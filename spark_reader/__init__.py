"""The PySpark source and sink, and the same read without Spark. Needs none of the broker's code.

Read `plan` (pure) and `planner` first, then `reading`, what a task does. `batch_source`,
`stream_source` and `sink` are what Spark calls; `option_table` and `options` say what may be asked.
"""
