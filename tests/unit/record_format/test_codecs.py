"""Codecs: framing of Kafka's clients, detection of truncation, limits on decompression."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import tracemalloc
import zlib
from functools import cache

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierlog.record_format.codecs import (
    CODEC_IDS,
    CODEC_NAMES,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    DecompressedTooLarge,
    compress,
    decompress,
)
from tierlog.record_format.errors import CorruptBatch

COMPRESSING = [GZIP, SNAPPY, LZ4, ZSTD]
TEXT = b"the log is the truth; " * 5000
NOISE = random.Random(1).randbytes(100_000)

each_codec = pytest.mark.parametrize("codec", COMPRESSING, ids=CODEC_NAMES.__getitem__)


def expand(codec: int, data: bytes, max_bytes: int = 1 << 20) -> bytes:
    return bytes(decompress(codec, data, max_bytes=max_bytes))


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE], ids=["empty", "byte", "text", "noise"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_compression_round_trips(codec: int, data: bytes, kind: type) -> None:
    assert expand(codec, kind(compress(codec, kind(data)))) == data


@each_codec
@given(data=st.binary(max_size=5000), repeats=st.integers(1, 50))
def test_any_bytes_round_trip(codec: int, data: bytes, repeats: int) -> None:
    assert expand(codec, compress(codec, data * repeats)) == data * repeats


def test_codec_names_and_ids_are_those_of_kafka() -> None:
    assert {name: CODEC_IDS[name] for name in ("none", "gzip", "snappy", "lz4", "zstd")} == {
        "none": 0,
        "gzip": 1,
        "snappy": 2,
        "lz4": 3,
        "zstd": 4,
    }
    assert CODEC_IDS["uncompressed"] == NONE


def test_an_unknown_codec_is_corrupt() -> None:
    for codec in (5, 6, 7):
        with pytest.raises(CorruptBatch, match=f"codec {codec}"):
            decompress(codec, b"", max_bytes=10)


def test_lz4_frames_have_the_descriptor_of_kafkas_java_client() -> None:
    # Magic, version 1 with independent blocks, 64 KiB, and the header checksum.
    assert compress(LZ4, b"x")[:7] == bytes.fromhex("04224d18 60 40 82")
    assert compress(LZ4, b"x")[-4:] == b"\0\0\0\0"  # ends with the end mark: no content checksum


def test_snappy_has_xerials_header_and_blocks_of_32_kib() -> None:
    data = compress(SNAPPY, NOISE)
    assert data[:16] == b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    position, sizes = 16, []
    while position < len(data):
        (size,) = struct.unpack_from(">i", data, position)
        block = data[position + 4 : position + 4 + size]
        sizes.append(len(bytes(cramjam.snappy.decompress_raw(block))))
        position += 4 + size
    assert sizes == [32768, 32768, 32768, 100_000 - 3 * 32768]


def test_raw_snappy_is_decompressed() -> None:
    assert expand(SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT))) == TEXT


def test_concatenated_frames_are_one_stream() -> None:
    assert expand(GZIP, compress(GZIP, b"one ") + compress(GZIP, b"two")) == b"one two"
    skippable = struct.pack("<II", 0x184D2A53, 5) + b"noise"
    two = compress(ZSTD, b"one ") + skippable + compress(ZSTD, b"two")
    assert expand(ZSTD, two) == b"one two"


def test_zstd_without_a_content_size_is_decompressed() -> None:
    """As streamed by the Java client, with and without a checksum."""
    for checksum in (False, True):
        stream = zstandard.ZstdCompressor(write_checksum=checksum).compressobj()
        data = stream.compress(TEXT) + stream.flush()
        assert zstandard.frame_content_size(data) == -1
        assert expand(ZSTD, data) == TEXT


def test_lz4_with_linked_blocks_and_checksums_is_decompressed() -> None:
    data = lz4.frame.compress(TEXT, block_linked=True, content_checksum=True, block_checksum=True)
    assert expand(LZ4, data) == TEXT


@pytest.mark.parametrize("block_size", [4, 5, 6, 7])
def test_lz4_with_any_descriptor_is_decompressed_within_the_limit(block_size: int) -> None:
    for text in (b"", b"x", TEXT * 20, NOISE * 7):
        for flags in range(16):
            data = lz4.frame.compress(
                text,
                block_size=block_size,
                block_linked=bool(flags & 1),
                content_checksum=bool(flags & 2),
                block_checksum=bool(flags & 4),
                store_size=bool(flags & 8),
            )
            for limit in (len(text), len(text) + (4 << 20)):
                assert expand(LZ4, data, limit) == text
            if text:
                with pytest.raises(DecompressedTooLarge):
                    expand(LZ4, data, len(text) - 1)
            with pytest.raises(CorruptBatch, match="after the frame"):
                expand(LZ4, data + b"x", 8 << 20)
            with pytest.raises(CorruptBatch):
                expand(LZ4, data[:-1], 8 << 20)


# --- bad bytes ------------------------------------------------------------------------------------


@each_codec
def test_a_truncated_stream_is_corrupt(codec: int) -> None:
    data = compress(codec, b"some bytes, some more bytes, and some more bytes" * 3)
    for size in range(len(data)):
        if codec == SNAPPY and size == 16:
            continue  # a header without blocks is valid: xerial's stream has no end mark
        with pytest.raises(CorruptBatch):
            expand(codec, data[:size])


@each_codec
@pytest.mark.parametrize("trailing", [b"\0", b"garbage", b"\xff" * 40])
def test_bytes_after_the_stream_are_corrupt(codec: int, trailing: bytes) -> None:
    with pytest.raises(CorruptBatch):
        expand(codec, compress(codec, b"some bytes") + trailing)


@each_codec
def test_a_flipped_bit_gives_bytes_within_the_limit_or_an_error(codec: int) -> None:
    data = compress(codec, b"some bytes, some more bytes, and some more bytes" * 3)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with contextlib.suppress(CorruptBatch):
                assert len(expand(codec, bytes(changed), 1000)) <= 1000


@each_codec
@given(data=st.binary(max_size=300))
def test_any_bytes_give_bytes_within_the_limit_or_an_error(codec: int, data: bytes) -> None:
    for prefix in (b"", compress(codec, b"")[:16]):
        with contextlib.suppress(CorruptBatch):
            assert len(expand(codec, prefix + data, 1000)) <= 1000


# --- bombs ----------------------------------------------------------------------------------------


@each_codec
def test_the_limit_is_exact(codec: int) -> None:
    data = compress(codec, TEXT)
    assert expand(codec, data, len(TEXT)) == TEXT
    with pytest.raises(DecompressedTooLarge):
        expand(codec, data, len(TEXT) - 1)
    with pytest.raises(DecompressedTooLarge):
        expand(codec, data, 0)
    assert expand(codec, compress(codec, b""), 0) == b""


def test_the_limit_is_exact_for_zstd_frames_without_a_content_size() -> None:
    def streamed(data: bytes) -> bytes:
        stream = zstandard.ZstdCompressor().compressobj()
        return stream.compress(data) + stream.flush()

    for data, whole in (
        (streamed(TEXT), TEXT),
        (streamed(b"one ") + streamed(TEXT), b"one " + TEXT),
        (streamed(TEXT) + streamed(b"x"), TEXT + b"x"),
        (compress(ZSTD, TEXT) + compress(ZSTD, TEXT), TEXT * 2),
    ):
        assert expand(ZSTD, data, len(whole)) == whole
        for too_few in (len(whole) - 1, len(whole) - 50, 1, 0):
            with pytest.raises(DecompressedTooLarge):
                expand(ZSTD, data, too_few)


@cache
def bombs() -> dict[str, tuple[int, bytes]]:
    zeros = b"\0" * (1 << 20)
    streamed = zstandard.ZstdCompressor().compressobj()
    rle_block = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    zstd_head = bytes.fromhex("28b52ffd 00 58")
    gzip = zlib.compressobj(9, zlib.DEFLATED, 31)
    return {
        "gzip": (GZIP, b"".join(gzip.compress(zeros) for _ in range(64)) + gzip.flush()),
        "gzip members": (GZIP, compress(GZIP, b"") * 100_000),
        "snappy blocks": (SNAPPY, compress(SNAPPY, zeros * 64)),
        "snappy claim": (SNAPPY, b"\xff\xff\xff\xff\x0f" + b"\0" * 100),
        "lz4": (LZ4, compress(LZ4, zeros * 64)),
        "lz4 claim": (LZ4, bytes.fromhex("04224d18 6840") + struct.pack("<Q", 2**62) + b"\0" * 5),
        "lz4 claim that fits": (LZ4, lz4.frame.compress(zeros, store_size=True)[:15] + b"\0" * 4),
        "lz4 of empty blocks": (LZ4, compress(LZ4, b"")[:7] + b"\0\0\0\x80" * 100_000),
        "zstd": (ZSTD, compress(ZSTD, zeros * 64)),
        "zstd streamed": (
            ZSTD,
            b"".join(streamed.compress(zeros) for _ in range(64)) + streamed.flush(),
        ),
        "zstd run-length blocks": (ZSTD, zstd_head + rle_block * 50_000 + b"\1\0\0"),
        "zstd content size": (
            ZSTD,
            bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 2**62) + b"\1\0\0",
        ),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_decompression_bomb_is_refused_within_limited_memory(name: str) -> None:
    codec, bomb = bombs()[name]
    limit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            expand(codec, bomb, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * limit + 2 * len(bomb)


# --- threads --------------------------------------------------------------------------------------


@each_codec
def test_compression_is_thread_safe(codec: int) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(30):
            data = bytes(source.choices(b"abcdef", k=5000))
            if expand(codec, compress(codec, data)) != data:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
