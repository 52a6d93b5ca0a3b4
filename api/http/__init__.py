"""The HTTP API.

Read `routes` first, the table of all calls, then `dispatch`, which every request goes through; then
`produce` and `fetch`, whose packages say in which order to read them, or `control_routes` and the
calls that carry no records and are FastAPI's: `admin`, `groups`, `registry` and `cluster`.

* `exchange` is one request; `bodies`, `header_values` and `strict_json` parse it, and `access`
  decides who may call.
* `responses` has what handlers return, `problems` the table of errors, and `memory_limits` bounds
  what all requests take.
* `docs` and `metrics` describe and count the calls.
* `api.app` assembles the application; `server` runs it, on the connections of `api.protocol`.
"""
