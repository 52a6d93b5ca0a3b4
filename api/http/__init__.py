"""The calls of the HTTP API.

Read `routes` first, the table of all calls, then `front`, where each request comes in, and then:

* a produce: `produce_head` (all that needs no body), `bodies`, `produce_columns` and
  `repeated_members` (JSON), `partitioner`, `produce_batches`, `produce_append`;
* a fetch: `fetch_at_once` where nothing is waited for, else `fetch`; `positions`, `reading`,
  `long_poll` over `watermarks`, `record_json`, `shared_pages`; `fetch_many` and `tail` are the same
  for many partitions and without an end;
* who may call: `access` asks `tokens`, `scopes` (the table), `host_check` and `client_rates`;
* what is answered: `answers`; refused: `problems` (the table); waiting to be sent:
  `unsent_answers`;
* what is told of it: `openapi` and `docs_page`, `metrics` (`metric_table` has the names);
* `app` puts it together, `server` runs it, on the connection that is `api.protocol`.
"""
