"""The three index files, byte for byte, and the entries that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.record_format import golden
from tierlog.record_format.errors import CorruptIndex
from tierlog.record_format.index_layouts import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    AbortedTxn,
    pack_entries,
    pack_txn_entry,
    pack_txn_index,
    parse_offset_index,
    parse_time_index,
    parse_txn_index,
)

LIVE = "live-copy"


def trimmed(path: Path, entry_size: int) -> bytes:
    """Without the preallocated zeros of a live file."""
    data = path.read_bytes()
    if LIVE not in str(path):
        return data
    used = len(data.rstrip(b"\0"))
    return data[: -(-used // entry_size) * entry_size]


def test_kafkas_offset_indexes_round_trip() -> None:
    for path in golden.files("*.index"):
        base = int(path.stem)
        data = trimmed(path, 8)
        size = path.with_suffix(".log").stat().st_size
        entries = parse_offset_index(data, base_offset=base, segment_size=size)
        again = pack_entries(
            OFFSET_ENTRY, [(entry.offset - base, entry.position) for entry in entries]
        )
        assert again == data, path


def test_kafkas_time_indexes_round_trip() -> None:
    for path in golden.files("*.timeindex"):
        base = int(path.stem)
        data = trimmed(path, 12)
        entries = parse_time_index(data, base_offset=base)
        again = pack_entries(
            TIME_ENTRY, [(entry.timestamp, entry.offset - base) for entry in entries]
        )
        assert again == data, path


def test_kafkas_transaction_indexes_round_trip() -> None:
    for path in golden.files("*.txnindex"):
        data = path.read_bytes()
        assert pack_txn_index(parse_txn_index(data, base_offset=int(path.stem))) == data, path


PRINTED = {
    parse_offset_index: r"^offset: (\d+) position: (\d+)",
    parse_time_index: r"^timestamp: (\d+) offset: (\d+)",
    parse_txn_index: r"producerId: (\d+) firstOffset: (\d+) lastOffset: (\d+) "
    r"lastStableOffset: (\d+)",
}


@pytest.mark.parametrize(
    ("parse", "dumps"),
    [
        (parse_offset_index, "dense-index-0.dumps/*.index.dump.txt"),
        (parse_time_index, "dense-index-0.dumps/*.timeindex.dump.txt"),
        (parse_txn_index, "*.txnindex.dump.txt"),
    ],
)
def test_entries_are_those_that_kafkas_dump_tool_prints(
    parse: Callable[..., Any], dumps: str
) -> None:
    for dump in golden.files(dumps):
        path = golden.dumped_by(dump)
        printed = re.findall(PRINTED[parse], dump.read_text(errors="replace"), re.M)
        entries = parse(path.read_bytes(), base_offset=int(path.stem))
        assert [tuple(map(str, entry)) for entry in entries] == printed, path


def test_entries_have_kafkas_bytes() -> None:
    assert pack_entries(OFFSET_ENTRY, [(5, 7)]) == bytes.fromhex("00000005 00000007")
    assert pack_entries(TIME_ENTRY, [(258, 5)]) == bytes.fromhex("0000000000000102 00000005")
    assert pack_txn_entry(AbortedTxn(1, 2, 3, 4)) == bytes.fromhex(
        "0000 0000000000000001 0000000000000002 0000000000000003 0000000000000004"
    )


@pytest.mark.parametrize(
    "entries",
    [
        [(5, 0), (5, 10)],
        [(5, 10), (4, 20)],
        [(5, 10), (6, 10)],
        [(5, 10), (6, 9)],
        [(-1, 10)],
        [(0, -1)],
        [(5, 10), (0, 0)],  # padding
        [(5, 100)],
    ],
)
def test_an_unordered_offset_index_is_corrupt(entries: list[tuple[int, int]]) -> None:
    data = pack_entries(OFFSET_ENTRY, entries)
    with pytest.raises(CorruptIndex):
        parse_offset_index(data, base_offset=0, segment_size=100, file="x.index")


@pytest.mark.parametrize(
    "entries", [[(5, 5), (4, 6)], [(5, 5), (5, 5)], [(5, 5), (6, 4)], [(5, -1)], [(5, 5), (0, 0)]]
)
def test_an_unordered_time_index_is_corrupt(entries: list[tuple[int, int]]) -> None:
    data = pack_entries(TIME_ENTRY, entries)
    with pytest.raises(CorruptIndex) as caught:
        parse_time_index(data, base_offset=0, file="x.timeindex")
    assert caught.value.file == "x.timeindex"


def test_equal_timestamps_at_increasing_offsets_are_valid() -> None:
    data = pack_entries(TIME_ENTRY, [(5, 5), (5, 6)])
    assert len(parse_time_index(data, base_offset=0)) == 2


@pytest.mark.parametrize(
    "entries",
    [[(1, 5, 9, 9), (1, 5, 9, 9)], [(1, 9, 5, 9)], [(1, -1, 5, 9)], [(1, 0, 2, 9)]],
)
def test_an_unordered_transaction_index_is_corrupt(
    entries: list[tuple[int, int, int, int]],
) -> None:
    data = pack_txn_index(AbortedTxn(*entry) for entry in entries)
    with pytest.raises(CorruptIndex):
        parse_txn_index(data, base_offset=3)


def test_a_transaction_index_of_another_version_is_refused() -> None:
    data = b"\0\1" + pack_txn_entry(AbortedTxn(1, 2, 3, 4))[2:]
    with pytest.raises(CorruptIndex, match="version 1"):
        parse_txn_index(data)


@pytest.mark.parametrize("size", [1, 7, 9, 11, 13])
def test_a_truncated_entry_is_corrupt(size: int) -> None:
    for parse in (parse_offset_index, parse_time_index, parse_txn_index):
        with pytest.raises(CorruptIndex, match="multiple"):
            parse(b"\1" * size, base_offset=0)
