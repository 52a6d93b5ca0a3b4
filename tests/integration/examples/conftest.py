import socket

import pytest


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
