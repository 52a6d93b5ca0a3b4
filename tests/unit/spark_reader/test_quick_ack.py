import pickle
import socket

import pytest

from spark_reader.quick_ack import QuickAckOnUnpickle


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux has it alone")
def test_what_is_unpickled_acknowledges_what_came_before_it():
    def acknowledges_at_once():
        return worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)

    with socket.create_server(("127.0.0.1", 0)) as server:
        jvm = socket.create_connection(server.getsockname())
        worker, _ = server.accept()
    with jvm, worker:
        for _ in range(100):  # until it looks like questions and answers
            jvm.sendall(b"task")
            worker.recv(4)
            worker.sendall(b"rows")
            jvm.recv(4)
            if not acknowledges_at_once():
                break
        assert not acknowledges_at_once()
        reader = QuickAckOnUnpickle()
        reader.columns = ("value",)
        assert pickle.loads(pickle.dumps(reader)).columns == ("value",)
        assert acknowledges_at_once()
