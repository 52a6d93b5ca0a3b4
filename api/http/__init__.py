"""The calls of the HTTP API.

Read `routes` first, the table of all calls, then `front`, where each request comes in; then
`produce`, `fetch` or `admin`, whose packages say in what order.

* What comes is an `exchange`, read by `request`; who may call is asked of `access`.
* What is answered: `answers`; refused: `problems` (the table); waiting to be sent:
  `unsent_answers`.
* What is told of it: `docs` and `metrics`.
* `app` puts it together, `server` runs it, on the connection that is `api.protocol`.
"""
