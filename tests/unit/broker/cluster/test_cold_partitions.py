"""When a broker reads the manifest of a partition that another leads, and how many it keeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.manifests import run_of
from tierlog.broker.cluster import cold_partitions
from tierlog.broker.cluster.cold_partitions import MANIFEST_MAX_AGE_S, ColdPartitions
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.membership.leaders import Leader, Leaders
from tierlog.host.waiting import Wait, WouldBlock

RECORD = TopicRecord(name="t", topic_id="id", partitions=9, config={}, created_ms=0)


class Case:
    """`loads`: (partition, the version that was known) of each manifest that was read."""

    def __init__(self) -> None:
        self.now_s, self.end_offset = 0.0, 500
        self.loads: list[tuple[int, int]] = []
        self.leaders = Leaders()
        self.cold = ColdPartitions(
            self,  # type: ignore[arg-type]
            self.leaders,
            clock=lambda: self.now_s,
        )
        self.hear(1, cold_end=500)

    def hear(self, node_id: int, *, cold_end: int, log_end: int = 900) -> None:
        self.leaders.put_report(
            node_id, {("id", n): Leader(1, log_end, cold_end, node_id) for n in range(9)}
        )

    def load_cold_reads(self, _: TopicRecord, number: int, *, at_least: int) -> Any:
        self.loads.append((number, at_least))
        segments = run_of(self.end_offset // 100)
        manifest = SimpleNamespace(
            end_offset=self.end_offset, version=len(self.loads), segments=segments, pages=()
        )
        return SimpleNamespace(manifest=manifest)

    def has(self, offset: int, number: int = 0) -> bool:
        return self.cold.find_reads(RECORD, number, offset) is not None


def test_a_manifest_is_read_once_and_again_when_it_is_old() -> None:
    case = Case()
    with pytest.raises(WouldBlock):
        case.cold.find_reads(RECORD, 0, 0, Wait.NEVER)
    assert case.has(0)
    assert case.has(499)
    assert not case.has(500)
    case.now_s = MANIFEST_MAX_AGE_S
    assert case.cold.find_reads(RECORD, 0, 7, Wait.NEVER) is not None
    assert case.loads == [(0, 0)]
    case.now_s += 0.1
    assert case.has(7)
    assert case.loads == [(0, 0), (0, 1)]


def test_all_who_need_it_at_once_wait_for_one_that_reads_it() -> None:
    case, together = Case(), threading.Barrier(8)

    def read(offset: int) -> bool:
        together.wait()
        return case.has(offset)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert case.loads == [(0, 0)]


def test_an_offset_that_the_leader_has_uploaded_since_is_looked_for_at_once() -> None:
    case = Case()
    assert case.has(0)
    assert not case.cold.may_have(RECORD, 0, 500)
    case.end_offset = 800
    case.hear(1, cold_end=800)
    assert case.cold.may_have(RECORD, 0, 500)
    assert case.has(0)
    assert len(case.loads) == 1  # what is known has this one
    assert case.has(700)
    assert not case.has(800)
    assert len(case.loads) == 2


def test_without_a_leader_all_that_it_had_may_be_there() -> None:
    case = Case()
    case.leaders.keep_only([])
    assert case.cold.heard_end(RECORD, 0) == 900
    assert case.cold.may_have(RECORD, 0, 899)
    assert not case.cold.may_have(RECORD, 0, 900)
    nobody = ColdPartitions(case, Leaders())  # type: ignore[arg-type]
    assert nobody.may_have(RECORD, 0, 10**9)
    assert nobody.heard_end(RECORD, 0) == 0


def test_entries_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_partitions, "ENTRIES_MAX", 18)
    case = Case()
    for number in (0, 1, 2, 0, 3):  # of six each
        assert case.has(0, number)
    assert [number for number, _ in case.loads] == [0, 1, 2, 3]
    for number in (2, 0, 3, 1):
        case.has(0, number)
    assert [number for number, _ in case.loads[4:]] == [1]
