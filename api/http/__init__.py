"""The calls of the HTTP API.

Read `routes` first, the table of all calls, then `front`, where each request comes in; then
`produce`, `fetch` or `admin`, whose packages say in which order to go on.

* A request is an `exchange`, read by `request`; `access` decides who may call.
* Responses are `answers`, refusals come from `problems` (the table), and `unsent_answers` holds
  what waits for a client.
* `docs` and `metrics` describe and count the calls.
* `api.app` puts it together; `server` runs it, on the connections of `api.protocol`.
"""
