"""HTTP/1.1 connections with limits, `sendfile`, and responses without a task. Nothing here knows
the API, and `slice_sender` not even HTTP.

Read `connection_state` first, then `connection`, which has `messages` in front of it and
`asgi_cycle` behind it; `service` says what an application is offered.

What is relied on of uvicorn, all of it documented or part of what it calls:

* `Config(http=…)` takes a class, which is called with `config`, `server_state`, `app_state` and
  `_loop`; `config.loaded_app` and `config.timeout_keep_alive`.
* Of `server_state`: `connections`, of which each is told to `shutdown()`, and which are awaited;
  `tasks`, which are awaited and, after `timeout_graceful_shutdown`, cancelled; `total_requests`;
  `default_headers`, the date.
* Of `Server`, in `api.http.server`: `run`, `startup`, `shutdown`, `handle_exit`, `should_exit`,
  `force_exit`, `servers`, `lifespan.state`, `lifespan.shutdown()`, `config.ssl`.
"""
