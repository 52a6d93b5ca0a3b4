"""What a leader was told by a coordinator elsewhere, and markers on their way to other brokers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tierlog.broker.membership.peers import Marker, TransactionPart
from tierlog.broker.transaction_coordinator.transaction import ProducerEpoch
from tierlog.broker.transaction_coordinator.transaction_peers import FENCED, NONE, TransactionPeers
from tierlog.hot_tier.producer_state import Producer, check_marker
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import PeerUnavailable, ProducerFenced, TransactionRefused
from tierlog.record_format.produced import build_marker

PLACE, PRODUCER = ("flights", 0), ProducerEpoch(1 << 33, 2)
PART = TransactionPart(
    transactional_id="copy",
    producer_id=PRODUCER.producer_id,
    producer_epoch=PRODUCER.epoch,
    partitions=[PLACE],
    adds=False,
)


class Scripted:
    """Another broker. `during`: is called while it answers."""

    def __init__(self) -> None:
        self.reason = NONE
        self.during: Callable[[], object] = lambda: None
        self.calls: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def take_part(self, _url: str, _part: TransactionPart) -> str:
        self.during()
        return self.reason

    def write_markers(self, url: str, markers: list[Marker]) -> list[str]:
        self.calls.append(len(markers))
        self.go_on.wait(10)
        if "down" in url:
            raise PeerUnavailable(url)
        return [FENCED if one.producer_epoch == 0 else self.reason for one in markers]


@pytest.fixture
def other() -> Scripted:
    return Scripted()


@pytest.fixture
def peers(other: Scripted) -> Iterator[TransactionPeers]:
    peers = TransactionPeers(other)  # type: ignore[arg-type]
    yield peers
    peers.close()


def marker(number: int, *, epoch: int = 1) -> Marker:
    return Marker(
        topic="flights",
        partition=number,
        producer_id=PRODUCER.producer_id,
        producer_epoch=epoch,
        committed=True,
        coordinator_epoch=3,
    )


def test_what_a_coordinator_said_is_good_for_its_producer_until_the_marker(
    peers: TransactionPeers,
) -> None:
    peers.ask("there", PART).result(10)
    assert peers.was_told(PLACE, PRODUCER)
    assert not peers.was_told(PLACE, PRODUCER._replace(epoch=3))
    peers.note_end(PLACE, PRODUCER.producer_id)
    assert not peers.was_told(PLACE, PRODUCER)


def test_an_answer_is_worthless_if_a_marker_was_written_while_it_was_asked_for(
    peers: TransactionPeers, other: Scripted
) -> None:
    other.during = lambda: peers.note_end(PLACE, PRODUCER.producer_id)
    peers.ask("there", PART).result(10)
    assert not peers.was_told(PLACE, PRODUCER)


def test_a_refusal_is_kafkas_and_is_not_kept(peers: TransactionPeers, other: Scripted) -> None:
    other.reason = "INVALID_PRODUCER_ID_MAPPING"
    with pytest.raises(TransactionRefused, match="INVALID_PRODUCER_ID_MAPPING"):
        peers.ask("there", PART).result(10)
    assert not peers.was_told(PLACE, PRODUCER)


def test_markers_that_wait_go_in_one_call_and_each_has_its_own_outcome(
    peers: TransactionPeers, other: Scripted
) -> None:
    other.go_on.clear()
    first = peers.send_marker("there", marker(0))
    others = [peers.send_marker("there", marker(n, epoch=n - 1)) for n in (1, 2, 3)]
    other.go_on.set()
    assert first.result(10) is None
    with pytest.raises(ProducerFenced):
        others[0].result(10)
    assert [one.result(10) for one in others[1:]] == [None, None]
    assert sum(other.calls) == 4
    assert len(other.calls) <= 3


def test_a_broker_that_does_not_answer_fails_its_own_markers_alone(
    peers: TransactionPeers,
) -> None:
    failed, sent = peers.send_marker("down", marker(0)), peers.send_marker("there", marker(0))
    with pytest.raises(PeerUnavailable):
        failed.result(10)
    assert sent.result(10) is None


@pytest.mark.parametrize(("epoch", "is_fenced"), [(4, True), (5, False), (6, False), (0, False)])
def test_a_coordinator_that_another_replaced_ends_nothing(epoch: int, is_fenced: bool) -> None:
    """Epoch 0 is of a broker alone."""
    known = Producer(
        producer_id=PRODUCER.producer_id,
        epoch=2,
        batches=(),
        coordinator_epoch=5,
        transaction_first_offset=-1,
        last_timestamp=0,
    )
    end = EndMarker(True, epoch)
    batches = build_marker(
        end, producer_id=PRODUCER.producer_id, producer_epoch=PRODUCER.epoch, timestamp=0
    )
    (header,) = iter_headers(bytes(batches.body))
    if is_fenced:
        with pytest.raises(TransactionRefused, match="coordinator epoch"):
            check_marker(known, header, end)
    else:
        check_marker(known, header, end)
