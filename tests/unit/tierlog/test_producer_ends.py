"""Producer: flush, close, Ctrl-C, a fork, and the interpreter's end."""

import itertools
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from random import Random

import httpx2
import pytest

from tests.fakes.tiny_broker import TinyBroker, client
from tests.fakes.waiting import until
from tierlog.client import producer as producers
from tierlog.client.batching import Batching
from tierlog.client.producer import Producer


@pytest.mark.parametrize("end", [Producer.flush, Producer.close])
def test_flush_and_close_return_while_others_send(end):
    broker, ended = TinyBroker(), threading.Event()

    def busy(request: httpx2.Request) -> httpx2.Response:
        if not ended.is_set():
            with suppress(RuntimeError):  # closed
                sent.append(producer.send("t", f"{len(sent)}", partition=0))
        return broker(request)

    with client(busy) as c:
        producer, sent = c.producer(), []
        first = producer.send("t", "first", partition=1)
        ending = threading.Thread(target=end, args=(producer,), daemon=True)
        ending.start()
        ending.join(10)
        returned, placed = not ending.is_alive(), first.done()
        ended.set()
        producer.close()
    assert returned
    assert placed
    assert [delivery.result(0).offset for delivery in sent] == list(range(len(sent)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_closing_the_client_fails_waiting_records():
    c = client(TinyBroker())
    producer = c.producer(Batching(linger_ms=60_000))
    sent = [producer.send("t", "v", partition=partition) for partition in (0, 1)]
    c.close()
    assert producer.flush(timeout_s=10)
    for delivery in sent:
        assert isinstance(delivery.exception(10), RuntimeError)
    with pytest.raises(RuntimeError, match="create a new one"):
        producer.send("t", "v", partition=0)
    producer.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_producer_refuses_to_work_after_a_fork_even_with_its_lock_held():
    broker, locked, forked = TinyBroker(), threading.Event(), threading.Event()

    def hold() -> None:
        with producer._condition:
            locked.set()
            forked.wait(10)

    with client(broker) as c, c.producer(Batching(linger_ms=60_000)) as producer:
        sent = producer.send("t", "of the parent", partition=0)
        holder = threading.Thread(target=hold)
        holder.start()
        assert locked.wait(10)
        child = os.fork()
        if not child:
            signal.alarm(10)
            try:
                assert not producer.flush()
                producer.close()
                for use in (sent.result, partial(producer.send, "t", "of the child", partition=0)):
                    with pytest.raises(RuntimeError, match="fork"):
                        use()
                os._exit(7)
            finally:
                os._exit(9)
        forked.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert broker.logs[0] == [b"of the parent"]


def test_at_exit_producers_are_flushed_together_within_one_limit():
    class TakesSixSeconds(Producer):
        def flush_or_fail(self, timeout_s: float) -> None:
            until(lambda: all(broker.logs[0] for broker in brokers))
            limits.append(timeout_s)
            now_s[0] += 6
            super().flush_or_fail(timeout_s)

    brokers, limits, now_s = [TinyBroker() for _ in range(3)], [], [100.0]
    clients = [client(broker) for broker in brokers]
    lingering = [TakesSixSeconds(c, Batching(linger_ms=600_000)) for c in clients]
    for producer in lingering:
        producer.send("t", "v", partition=0)
    producers.flush_at_exit(lingering, clock=lambda: now_s[0])
    assert limits == [10, 4, 0]
    for producer, c in zip(lingering, clients, strict=True):
        producer.close()
        c.close()


@pytest.fixture
def ctrl_c(monkeypatch):
    """`with ctrl_c(after_s=…)`: a signal that raises KeyboardInterrupt after that time.

    Python ignores what is raised in destructors and garbage collector callbacks; so do we.
    """
    original_hook = sys.unraisablehook

    def ignore_interrupts(unraisable):
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            original_hook(unraisable)

    def interrupt(*_):
        raise KeyboardInterrupt

    @contextmanager
    def interrupted(*, after_s):
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    monkeypatch.setattr(sys, "unraisablehook", ignore_interrupts)
    before = signal.signal(signal.SIGALRM, interrupt)
    yield interrupted
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("linger_ms", [0, 2])
def test_an_interrupt_in_send_loses_no_record_and_close_returns(ctrl_c, linger_ms):
    """As in a notebook: a cell is interrupted, and the producer is used again."""
    random, numbers, sent = Random(linger_ms), itertools.count(), {}
    broker = TinyBroker()
    with client(broker) as c:
        producer = c.producer(Batching(linger_ms=linger_ms))
        for _ in range(400):
            with suppress(KeyboardInterrupt), ctrl_c(after_s=random.uniform(30e-6, 300e-6)):
                # Limited, because Python may ignore the interrupt.
                for n in itertools.islice(numbers, 5_000):
                    sent[n] = producer.send("t", f"{n}", partition=0)
            n = next(numbers)
            sent[n] = producer.send("t", f"{n}", partition=0)
            sent[n].result(10)  # sent without a flush
        closing = threading.Thread(target=producer.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert producer._accumulator.buffered_bytes == 0
    arrived = [int(value) for value in broker.logs[0]]
    assert arrived == sorted(set(arrived))
    assert {n: arrived[sent[n].result(0).offset] for n in sent} == {n: n for n in sent}
