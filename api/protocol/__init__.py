"""HTTP/1.1 connections: uvicorn's protocol with limits, sendfile, and responses without a task.

Nothing here knows the API. Read `limited_protocol` first, then `zerocopy` and `immediate`.
"""
