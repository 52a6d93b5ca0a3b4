import os
import pickle
import socket

import pytest

from tierlog.spark_reader.workarounds import QuickAckOnUnpickle


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only on Linux")
def test_unpickling_turns_on_quick_acks():
    def quick_ack():
        return worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)

    with socket.create_server(("127.0.0.1", 0)) as server:
        jvm = socket.create_connection(server.getsockname())
        worker, _ = server.accept()
    with jvm, worker:
        for _ in range(100):  # until the kernel sees an interactive session and delays ACKs
            jvm.sendall(b"task")
            worker.recv(4)
            worker.sendall(b"rows")
            jvm.recv(4)
            if not quick_ack():
                break
        assert not quick_ack()
        assert pickle.loads(pickle.dumps(_reader())).columns == ("value",)
        assert quick_ack()


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_default_timeout_of_a_users_code_leaves_the_jvms_connection_as_it_is(is_blocking):
    """It stays set in a worker, which has further tasks; Spark reads as from a blocking socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        jvm = socket.create_connection(server.getsockname())
        worker, _ = server.accept()
    with jvm, worker:
        os.set_blocking(worker.fileno(), is_blocking)
        socket.setdefaulttimeout(10)
        try:
            pickle.loads(pickle.dumps(_reader()))
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(worker.fileno()) == is_blocking


def _reader():
    reader = QuickAckOnUnpickle()
    reader.columns = ("value",)
    return reader
