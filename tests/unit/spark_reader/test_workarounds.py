"""What stands in for Spark's faults does what it stands for."""

from __future__ import annotations

import os
import pickle
import signal
import socket

import pytest

from tierlog.spark_reader.workarounds import QuickAckOnUnpickle, interrupt_deferred


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


@pytest.mark.parametrize(("times", "started"), [(1, True), (2, False)])
def test_the_first_interrupt_is_deferred_until_spark_has_started(times, started):
    before, starts = signal.getsignal(signal.SIGINT), []

    def start():
        with interrupt_deferred():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            starts.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert bool(starts) == started
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_set_by_spark_is_kept():
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupt_deferred():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
