"""An HTTP/1.1 connection: uvicorn's protocol with limits, sendfile, and responses without a task.

It knows none of the calls. Read `limited_protocol` first, then `zerocopy`.
"""
