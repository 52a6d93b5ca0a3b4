"""The broker from Python: one sans-I/O core under a synchronous and an asynchronous client.

* Calls: `calls` and `group_calls` define requests and results, `exchange` retries, `problems` maps
  error responses; `client` does the I/O through `transport`, with the calls as methods.
* Consumers: `scheduling` is the progress in each partition, and the order of fetches.
* Producers: `batching` gathers records, `sender` chooses their partitions and sends them;
  `producer` and `async_producer` are the thread and the task around them.
"""
