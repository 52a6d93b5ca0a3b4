"""`POST /v1/replica/fetch` between a broker and its followers, which are asked here by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import msgspec
import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.http.cluster.peers import HttpPeers
from tierlog.broker.replication.messages import (
    Answered,
    Fetched,
    FetchHead,
    PartitionAnswer,
    PartitionFetch,
    ReplicaFetch,
)
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.object_store.open import open_store
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import PeerUnavailable

BATCH = bytes(encode_batch([b"value"] * 9, timestamps=[1] * 9))


class FakeReplicas:
    """Answers with whatever of `file` is beyond a follower's end offset, taken for a position."""

    def __init__(self, file: Path, served: Served) -> None:
        self.file, self.asked = file, list[tuple[ReplicaFetch, bool]]()
        cluster = cluster_of(served.broker)
        self._real, cluster.replicas = cluster.replicas, self  # type: ignore[assignment]
        self.files = list[OpenFile]()
        self.waiting = list[Callable[[], None]]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def append(self, data: bytes) -> None:
        with self.file.open("ab") as out:
            out.write(data)
        for callback in self.waiting.copy():
            callback()

    def take_fetch(self, request: ReplicaFetch) -> FakeTaken:
        return FakeTaken(self, request)

    def answer(self, request: ReplicaFetch) -> list[Answered]:
        size = self.file.stat().st_size
        return [self._row(one, size) for one in request.partitions if size > one.end_offset]

    def _row(self, one: PartitionFetch, size: int) -> Answered:
        count = size - one.end_offset
        self.files.append(OpenFile(self.file))
        piece = FileSlice(self.files[-1], one.end_offset, count)
        return Answered(answer_of(one.topic_id, one.partition, size_bytes=count), (piece,))


class FakeTaken:
    session_id = 77

    def __init__(self, replicas: FakeReplicas, request: ReplicaFetch) -> None:
        self._replicas, self._request = replicas, request

    def answer(self, *, is_over: bool) -> list[Answered]:
        self._replicas.asked.append((self._request, is_over))
        return self._replicas.answer(self._request)

    def wait_for_news(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._replicas.waiting.append(callback)
        return lambda: self._replicas.waiting.remove(callback)


def answer_of(topic_id: str = "a", partition: int = 0, *, size_bytes: int = 0) -> PartitionAnswer:
    return PartitionAnswer(
        topic_id=topic_id,
        partition=partition,
        leader_epoch=3,
        number=1,
        high_watermark=0,
        log_start_offset=0,
        local_log_start_offset=0,
        segment_base_offset=0,
        size_bytes=size_bytes,
    )


def fetch_of(
    *places: tuple[str, int, int], wait_ms: int = 0, max_bytes: int = 1 << 20
) -> ReplicaFetch:
    """`places`: topic id, partition and end offset of each."""
    return ReplicaFetch(
        node_id=7,
        wait_ms=wait_ms,
        max_bytes=max_bytes,
        partitions=[
            PartitionFetch(
                topic_id=topic_id,
                partition=partition,
                replica_id="r.0",
                leader_epoch=3,
                seen=3,
                last_epoch=-1,
                end_offset=end_offset,
                flushed_end=0,
                log_start_offset=0,
                answered=0,
                high_watermark=0,
            )
            for topic_id, partition, end_offset in places
        ],
    )


def fetched(peers: HttpPeers, url: str, request: ReplicaFetch) -> list[Fetched]:
    asked = {(one.topic_id, one.partition) for one in request.partitions}
    return peers.fetch_replicas(url, request, asked=asked).rows


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Served]:
    store = open_store((tmp_path / "bucket").as_uri())
    with served_broker(
        tmp_path / "data", store=store, cluster_join=True, heartbeat_interval_ms=200
    ) as served:
        yield served


@pytest.fixture
def replicas(leader: Served, tmp_path: Path) -> FakeReplicas:
    file = tmp_path / "00.log"
    file.touch()
    return FakeReplicas(file, leader)


@pytest.fixture
def peers() -> Iterator[HttpPeers]:
    made = HttpPeers()
    yield made
    made.close()


def test_a_follower_receives_rows_and_their_bytes_over_a_connection_that_is_kept(
    leader: Served, replicas: FakeReplicas, peers: HttpPeers
) -> None:
    replicas.append(BATCH * 20_000)
    size = len(BATCH) * 20_000
    for _ in range(3):
        first, second = fetched(
            peers,
            leader.server.url,
            fetch_of(("a", 0, 0), ("b", 5, size - 100), max_bytes=2 * size),
        )
        assert bytes(first.batches) == BATCH * 20_000
        assert bytes(second.batches) == (BATCH * 20_000)[-100:]
        assert (second.answer.topic_id, second.answer.partition) == ("b", 5)
    assert fetched(peers, leader.server.url, fetch_of(("a", 0, size))) == []
    assert [len(idle) for idle in peers._replicas._idle.values()] == [1]
    until(lambda: all(file.fd == -1 for file in replicas.files))


def test_a_fetch_waits_for_news_and_no_longer_than_it_says(
    leader: Served, replicas: FakeReplicas, peers: HttpPeers
) -> None:
    url = leader.server.url
    with ThreadPoolExecutor(2) as threads:
        waits = [
            threads.submit(fetched, peers, url, fetch_of(("a", 0, 0), wait_ms=20_000))
            for _ in range(2)
        ]
        until(lambda: len(replicas.waiting) == 2)
        replicas.append(BATCH)
        assert [bytes(one.result(20)[0].batches) for one in waits] == [BATCH, BATCH]
    assert replicas.waiting == []
    end = len(BATCH)
    assert fetched(peers, url, fetch_of(("a", 0, end), wait_ms=50)) == []
    ends = [is_over for _, is_over in replicas.asked[-2:]]
    assert ends == [False, True], "it hears of a watermark then"
    assert replicas.waiting == []


def test_a_fetch_that_waits_ends_with_the_server(tmp_path: Path, peers: HttpPeers) -> None:
    store = open_store((tmp_path / "bucket").as_uri())
    (tmp_path / "00.log").touch()
    with ThreadPoolExecutor(1) as threads:
        with served_broker(tmp_path / "data", store=store, cluster_join=True) as leader:
            fake = FakeReplicas(tmp_path / "00.log", leader)
            request = fetch_of(("a", 0, 0), wait_ms=60_000)
            waiting = threads.submit(fetched, peers, leader.server.url, request)
            until(lambda: len(fake.waiting) == 1)
        assert waiting.result(20) == []


def test_a_connection_that_the_leader_closed_is_made_again(
    tmp_path: Path, peers: HttpPeers
) -> None:
    asked: list[int] = []
    with _Answering([_framed([answer_of(size_bytes=3)], b"abc")] * 2, asked=asked) as url:
        for _ in range(2):
            (found,) = fetched(peers, url, fetch_of(("a", 0, 0)))
            assert bytes(found.batches) == b"abc"
    assert asked == [0, 1], "each over a connection of its own: the leader closes it"


def test_a_broker_without_replicas_refuses_and_so_does_a_fetch_that_is_none(
    tmp_path: Path, peers: HttpPeers
) -> None:
    with (
        served_broker(tmp_path / "alone") as alone,
        pytest.raises(PeerUnavailable, match=r"409.*not-in-cluster"),
    ):
        fetched(peers, alone.server.url, fetch_of())
    with pytest.raises(PeerUnavailable, match="Port"):
        fetched(peers, "http://127.0.0.1:x", fetch_of())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"node_id":1,"wait_ms":-1,"max_bytes":1,"partitions":[]}',
        b'{"node_id":1,"wait_ms":60001,"max_bytes":1,"partitions":[]}',
        b'{"node_id":1,"wait_ms":0,"max_bytes":1,"partitions":[["a",0]]}',
        b'{"node_id":1,"wait_ms":0,"max_bytes":1,"partitions":[],"more":1}',
    ],
)
def test_a_fetch_that_is_not_valid_is_refused_and_nobody_is_asked(
    leader: Served, replicas: FakeReplicas, body: bytes
) -> None:
    refused = httpx2.post(
        f"{leader.server.url}/v1/replica/fetch",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid-request")
    assert replicas.asked == []


# --- what a leader that is out of its mind may answer --------------------------------------------


def _framed(rows: list[PartitionAnswer], batches: bytes) -> bytes:
    head = msgspec.json.encode(FetchHead(session_id=1, partitions=rows))
    return len(head).to_bytes(4, "big") + head + batches


def _http(body: bytes, *, length: int | None = None, kind: str = "replica-fetch") -> bytes:
    length = len(body) if length is None else length
    return (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.tierlog.{kind}\r\n"
        f"content-length: {length}\r\n\r\n".encode()
        + body
    )


class _Answering:
    """A server that gives each connection the next of these answers, and closes it."""

    def __init__(self, answers: list[bytes], *, asked: list[int] | None = None) -> None:
        self._answers = [one if one.startswith(b"HTTP") else _http(one) for one in answers]
        self._asked = [] if asked is None else asked
        self._socket = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return "http://127.0.0.1:{1}".format(*self._socket.getsockname())

    def _serve(self) -> None:
        for number, answer in enumerate(self._answers):
            connection, _ = self._socket.accept()
            with connection:
                while b"partitions" not in connection.recv(1 << 16):
                    pass
                self._asked.append(number)
                connection.sendall(answer)

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._socket.close()


LARGE = bytes(encode_batch([b"x" * 5_000], timestamps=[1]))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_http(b"", kind="other"), "no answer"),
        (_http(b"\xff\xff\xff\xff"), "its head has 4294967295 bytes"),
        (_http(b"\0\0\0\x10[]", length=20), "cut short"),
        (b"\0\0\0\x02{}", "array"),
        (_framed([answer_of("z")], b""), "not asked for"),
        (_framed([answer_of(), answer_of()], b""), "one twice"),
        (_framed([answer_of(size_bytes=4)], b"abc"), "its rows 4"),
        (_http(_framed([answer_of(size_bytes=9)], b"abc"), length=2**40), "its body has"),
        (_framed([answer_of(size_bytes=1001)], b"x" * 1001), "more than the 1000 bytes"),
        (
            _framed(
                [answer_of(size_bytes=1000), answer_of("b", size_bytes=len(LARGE))],
                b"x" * 1000 + LARGE,
            ),
            "more than the 1000 bytes",
        ),
        (b"HTTP/1.1 500 No\r\ncontent-length: 900000000\r\n\r\nwhy not", "500: why not"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "no answer"),
        (b"nothing like HTTP\r\n\r\n", "127.0.0.1"),
    ],
)
def test_an_answer_that_no_leader_gives_is_refused(
    peers: HttpPeers, answer: bytes, why: str
) -> None:
    with _Answering([answer]) as url, pytest.raises(PeerUnavailable, match=why):
        fetched(peers, url, fetch_of(("a", 0, 0), ("b", 0, 0), max_bytes=1000))


def test_one_batch_may_be_larger_than_was_asked_for(peers: HttpPeers) -> None:
    rows = [answer_of(size_bytes=999), answer_of("b", size_bytes=len(LARGE))]
    with _Answering([_framed(rows, b"x" * 999 + LARGE)]) as url:
        first, second = fetched(peers, url, fetch_of(("a", 0, 0), ("b", 0, 0), max_bytes=1000))
    assert (bytes(first.batches), bytes(second.batches)) == (b"x" * 999, LARGE)


def test_a_leader_that_does_not_answer_in_time_is_given_up() -> None:
    peers = HttpPeers(session_timeout_ms=100)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PeerUnavailable, match="timed out"),
    ):
        fetched(peers, "http://127.0.0.1:{1}".format(*silent.getsockname()), fetch_of())
    peers.close()
