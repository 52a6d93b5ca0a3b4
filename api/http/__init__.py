"""The calls of the HTTP API.

Read `routes` first, the table of all calls, then `front` (where each request comes in), `produce`,
`fetch` and `tail`. What is refused, and how, is the table in `problems`.
"""
