"""An HTTP/1.1 connection: uvicorn's protocol with limits, sendfile and answers without a task.

Knows none of the calls. Read `limited_protocol` first, then `zerocopy`.
"""
