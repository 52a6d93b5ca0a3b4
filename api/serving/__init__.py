"""What both front doors, `http` and `kafka`, stand on. It knows neither's protocol.

| file | what it is |
|---|---|
| `listening` | sockets that listen, with and without TLS |
| `deadline` | how long a state of a connection may last |
| `slice_sender` | slices of files over a connection, with zero copy |
| `waiting_requests` | requests that wait for a high watermark |
| `workers` | the threads for calls that block |
| `produced_batches` | batches that a producer made, checked by the topic's configuration |
| `grants`, `tokens` | what a caller may do, and who the caller is |
"""
