"""Pages of records, and removed batches, over real files of encoded batches."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from tests.fakes.flush import fsync
from tierlog.api.http.fetch import record_json, record_pages
from tierlog.api.http.fetch.record_json import PageText, write_array, write_lines
from tierlog.api.http.fetch.record_pages import filter_batches, read_page
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format import codecs
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn


def fetched(path: Path, *batches: bytes, aborted: tuple[AbortedTxn, ...] = ()) -> Fetched:
    data = b"".join(batches)
    path.write_bytes(data)
    end = list(iter_headers(data))[-1].next_offset
    slices = (FileSlice(OpenFile(path), 0, len(data)),)
    return Fetched(slices, end, end, 0, end, "hot", aborted)


def batch(
    base: int,
    *values: bytes | None,
    producer_id: int = -1,
    control: bool = False,
    codec: int = codecs.NONE,
) -> bytes:
    more = {"producer_epoch": 0, "base_sequence": 0} if producer_id >= 0 else {}
    return bytes(
        encode_batch(
            list(values),
            timestamps=[base] * len(values),
            base_offset=base,
            producer_id=producer_id,
            transactional=producer_id >= 0,
            control=control,
            codec=codec,
            **more,
        )
    )


def text_of(text: PageText) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else b"".join(part.pieces()) for part in text.parts
    )


ABORT = b"\x00\x00\x00\x00\x00\x00"


def test_control_batches_aborted_batches_and_records_below_the_offset_are_left_out(
    tmp_path: Path,
) -> None:
    transactions = fetched(
        tmp_path / "log",
        batch(0, b"a", b"b"),
        batch(2, b"gone", producer_id=7),
        batch(3, b"kept", producer_id=8),
        batch(4, ABORT, producer_id=7, control=True),
        batch(5, b"later", producer_id=7),
        aborted=(AbortedTxn(7, 2, 4, 2),),
    )
    page = read_page(transactions, offset=1, max_bytes=1000)
    shown = json.loads(b"[" + text_of(write_array(page, "utf8")) + b"]")
    assert [(r["offset"], r["value"]) for r in shown] == [(1, "b"), (3, "kept"), (5, "later")]
    assert page.next_offset == 6
    left = filter_batches(transactions, offset=1, max_records=None)
    kept = [h.base_offset for piece in left.slices for h in iter_headers(piece.read())]
    assert kept == [0, 3, 5]
    assert len(left.slices) == 3


def test_a_page_ends_at_its_limit_but_never_before_one_record(tmp_path: Path) -> None:
    whole = fetched(tmp_path / "log", batch(0, b"x" * 10, b"y" * 10), batch(2, b"z" * 10))
    for max_bytes, count in ((1, 1), (17, 1), (33, 1), (34, 2), (50, 2), (51, 3)):
        page = read_page(whole, offset=0, max_bytes=max_bytes)
        assert (page.record_count, page.next_offset) == (count, count)
    page = read_page(whole, offset=1, max_bytes=1000, max_records=1)
    assert (page.record_count, page.next_offset) == (1, 2)


def test_empty_records_fill_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = fetched(tmp_path / "few", batch(0, *[None] * 100, codec=codecs.GZIP))
    assert read_page(few, offset=0, max_bytes=70).next_offset == 10
    monkeypatch.setattr(record_pages, "PAGE_RECORDS", 99)
    assert read_page(few, offset=0, max_bytes=64 << 20).record_count == 99


def test_a_page_of_few_records_takes_no_memory_for_the_others_of_a_large_batch(
    tmp_path: Path,
) -> None:
    many = fetched(tmp_path / "log", batch(0, *[b"value"] * 20_000, codec=codecs.GZIP))
    tracemalloc.start()
    try:
        page = read_page(many, offset=10_000, max_bytes=1 << 20, max_records=10)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (page.record_count, page.next_offset) == (10, 10_010)
    assert peak_bytes < 2_000_000, "13 bytes a record, and 56 if the walk is compiled"


def test_lines_hold_one_record_each_whatever_their_values(tmp_path: Path) -> None:
    pretty = b'{\n "a": "b\\nc"\r\n}'
    some = fetched(tmp_path / "log", batch(0, pretty, b"not\njson", b"\xff", None, b"1e400"))
    page = read_page(some, offset=0, max_bytes=1000)
    lines = text_of(write_lines(page, partition=3, encoding="json")).split(b"\n")
    assert lines[-1] == b""
    assert len(lines) == 6
    assert b'"value":{ "a": "b\\nc"}' in lines[0]
    assert json.loads(lines[1])["value"] == "not\njson"
    assert json.loads(lines[2])["value_base64"] == "/w=="
    assert json.loads(lines[3])["value"] is None
    assert b'"value":1e400' in lines[4]


def test_a_batch_that_fails_its_checksum_is_never_shown(tmp_path: Path) -> None:
    data = bytearray(batch(0, b"a") + batch(1, b"b") + batch(2, b"c"))
    data[2 * len(batch(0, b"a")) - 2] ^= 1
    bad = fetched(tmp_path / "log", bytes(data))
    page = read_page(bad, offset=0, max_bytes=1000)
    assert (page.record_count, page.next_offset) == (1, 1), "the records before it are returned"
    with pytest.raises(CorruptBatch) as refused:
        read_page(bad, offset=1, max_bytes=1000)
    assert refused.value.file.endswith("log")
    assert refused.value.position == len(batch(0, b"a"))


def test_raw_batches_end_where_the_last_one_does_whatever_follows(tmp_path: Path) -> None:
    first = batch(0, b"a", b"b")
    data = bytearray(first + batch(2, b"c"))
    whole = fetched(tmp_path / "log", bytes(data))
    data[len(first) + 6] ^= 1  # of a base offset
    (tmp_path / "log").write_bytes(data)
    kept = filter_batches(whole, offset=0, max_records=2)
    assert (kept.next_offset, sum(one.size_bytes for one in kept.slices)) == (2, len(first))


@pytest.mark.parametrize("byte", [9, 16])
def test_raw_batches_end_before_one_whose_header_is_corrupt(tmp_path: Path, byte: int) -> None:
    """Its length now extends past the fetch, or its magic is wrong."""
    first = batch(0, b"a", b"b")
    data = bytearray(first + batch(2, b"c") + batch(3, b"d"))
    whole = fetched(tmp_path / "log", bytes(data))
    data[len(first) + byte] ^= 0x7F
    (tmp_path / "log").write_bytes(data)
    kept = filter_batches(whole, offset=0, max_records=9)
    assert (kept.next_offset, sum(one.size_bytes for one in kept.slices)) == (2, len(first))
    rest = whole._replace(slices=(whole.slices[0]._replace(position=len(first)),))
    with pytest.raises(CorruptBatch) as refused:
        filter_batches(rest, offset=2, max_records=9)
    assert (refused.value.file, refused.value.position) == (str(tmp_path / "log"), len(first))


@pytest.mark.parametrize("byte", [0, 7, 8])
def test_a_batch_whose_offset_or_length_is_corrupt_is_never_shown(
    tmp_path: Path, byte: int
) -> None:
    """No checksum covers them. Byte 8 is of the length."""
    first = batch(0, b"a", b"b")
    data = bytearray(first + batch(2, b"c") + batch(3, b"d"))
    bad = fetched(tmp_path / "log", bytes(data))
    data[len(first) + byte] ^= 3
    (tmp_path / "log").write_bytes(data)
    page = read_page(bad, offset=0, max_bytes=1000)
    assert (page.record_count, page.next_offset) == (2, 2)
    with pytest.raises(CorruptBatch) as refused:
        read_page(bad, offset=2, max_bytes=1000)
    assert refused.value.position == len(first)


@pytest.mark.skipif(not page_cache.NOWAIT, reason="no RWF_NOWAIT on this system")
def test_a_read_that_never_waits_raises_instead_of_reading_from_disk(tmp_path: Path) -> None:
    # Of many reads of the disk, at least one is not over before the next attempt.
    whole = fetched(tmp_path / "log", batch(0, b"x" * 4_000_000))
    size, fd = whole.size_bytes, whole.slices[0].file.fd
    try:
        assert read_page(whole, offset=0, max_bytes=size, wait=Wait.NEVER).record_count == 1
    except WouldBlock:
        pytest.skip("this file system cannot say what is in memory")
    fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    for _ in range(20):  # a first attempt makes the kernel read ahead, and a disk is fast
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for position in (0, size - 1):  # what the search for the batch and its end reads
            os.pread(fd, 1, position)
        if page_cache.resident_bytes(fd) >= size:
            pytest.skip("this file system keeps everything in memory")
        try:
            page = read_page(whole, offset=0, max_bytes=size, wait=Wait.NEVER)
        except WouldBlock:
            break
        assert page.record_count == 1
    else:
        pytest.fail("it never said that it would wait")
    assert read_page(whole, offset=0, max_bytes=size).record_count == 1


VALUES = (
    b"",
    None,
    b"\0" * 700,
    b'"' * 64 + "\u20ac".encode() * 300,
    b"\xff" * 500,
    b"text" * 90 + b"\xe2\x82",
    b'{"a":\n' + b"[1, 2]" + b" " * 400 + b"}",
    b'{"no json"' * 60,
)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record of more than 100 bytes is a large one, and every field of more than 50."""
    for module, name, value in (
        (record_pages, "LARGE_RECORD_BYTES", 100),
        (record_json, "PIECE_BYTES", 50),
        (codecs, "PIECE_BYTES", 64),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("codec", codecs.CODEC_NAMES)
@pytest.mark.parametrize("encoding", ["utf8", "json", "base64"])
def test_a_large_record_has_the_same_text_as_in_a_page(
    tmp_path: Path, all_large: None, codec: int, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(VALUES)
    headers = [(("h", value), ("\u00e9" * 80, b"x")) for value in VALUES]
    data = encode_batch(
        list(VALUES),
        keys=list(VALUES)[::-1],
        headers=headers,
        timestamps=[5] * count,
        codec=codec,
    )
    whole = fetched(tmp_path / "log", bytes(data))
    for batch_bytes in (record_pages.BATCH_BYTES, 1):  # decoded at once, or record by record
        monkeypatch.setattr(record_pages, "BATCH_BYTES", batch_bytes)
        for offset in range(count):
            page = read_page(whole, offset=offset, max_bytes=1)
            assert page.large is not None
            assert (page.record_count, page.next_offset) == (1, offset + 1)
            one = text_of(write_array(page, encoding))
            line = text_of(write_lines(page, partition=3, encoding=encoding))
            with monkeypatch.context() as usual:
                usual.setattr(record_pages, "LARGE_RECORD_BYTES", 1 << 20)
                usual.setattr(record_pages, "BATCH_BYTES", 32 << 20)
                plain = read_page(whole, offset=offset, max_bytes=1)
            assert plain.large is None
            assert one == text_of(write_array(plain, encoding))
            assert line == text_of(write_lines(plain, partition=3, encoding=encoding))


@pytest.mark.parametrize("codec", [codecs.NONE, codecs.ZSTD])
def test_a_page_ends_before_a_large_record(tmp_path: Path, all_large: None, codec: int) -> None:
    some = fetched(tmp_path / "log", batch(0, b"a", b"b", b"large" * 100, b"c", codec=codec))
    page = read_page(some, offset=0, max_bytes=1000)
    assert (page.record_count, page.next_offset, page.large) == (2, 2, None)
    page = read_page(some, offset=2, max_bytes=1000)
    assert page.large is not None
    assert page.next_offset == 3
    assert read_page(some, offset=3, max_bytes=1000).next_offset == 4


def test_a_batch_too_large_to_be_decoded_at_once_has_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [b"%d" % number for number in range(500)]
    many = fetched(tmp_path / "log", batch(0, *values, codec=codecs.LZ4), batch(500, b"after"))
    pages = [read_page(many, offset=at, max_bytes=1000) for at in (0, 7, 499, 500)]
    monkeypatch.setattr(record_pages, "BATCH_RECORDS", 100)
    for at, page in zip((0, 7, 499, 500), pages, strict=True):
        again = read_page(many, offset=at, max_bytes=1000)
        assert again.next_offset == page.next_offset
        assert again.batches == page.batches


def test_the_text_of_a_page_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nuls = fetched(tmp_path / "log", batch(0, *[bytes(100)] * 50))
    page = read_page(nuls, offset=0, max_bytes=1 << 20)
    monkeypatch.setattr(record_pages, "CHUNK_BYTES", 300)
    monkeypatch.setattr(record_json, "TEXT_BYTES", 10_000)
    text = record_json.write_lines(page, partition=0, encoding="utf8")
    assert text.size_bytes <= 10_000
    assert text.records == text.next_offset == text_of(text).count(b"\n")
    assert 10 < text.records < 20
