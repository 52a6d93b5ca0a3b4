"""The five compression codecs of record batches, with the framing of Kafka's own clients: at once,
or in pieces for what is too large for that.

Rules that keep it honest:

* The decompressed size is bounded: no call returns or allocates more than `max_bytes` of output, or
  a few pieces, whatever sizes the input declares.
* At once, the whole input must be consumed: truncated streams and trailing bytes are corrupt. Who
  takes pieces knows how many bytes the records need.
* Compressor objects are per thread; none is shared.

Kafka's framing: gzip members; snappy in xerial's stream format (raw snappy, which librdkafka
writes, is accepted too); LZ4 frames with independent 64 KiB blocks and no content checksum
(KIP-57); zstd frames (KIP-110).
"""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Final

import cramjam
import lz4.frame
import zstandard

from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import CorruptBatch

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

CODEC_NAMES: Final[dict[int, str]] = {
    NONE: "none",
    GZIP: "gzip",
    SNAPPY: "snappy",
    LZ4: "lz4",
    ZSTD: "zstd",
}
# The topic setting `compression.type` calls it `uncompressed`.
CODEC_IDS: Final[dict[str, int]] = {
    "uncompressed": NONE,
    **{name: codec for codec, name in CODEC_NAMES.items()},
}

MAX_EXPANDED_BYTES: Final = 256 * 1024 * 1024

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = 32 * 1024
_I32: Final = struct.Struct(">i")
# No snappy element of 3 bytes yields more than 64, so a larger declared size is invalid.
SNAPPY_MAX_RATIO: Final = 32
_LZ4_MAGIC: Final = 0x184D2204
# An LZ4 sequence yields at most 255 bytes per input byte.
_LZ4_MAX_RATIO: Final = 256
_LZ4_PIECE_BYTES: Final = 256 << 10
# Each member after the first copies the rest of the input, and clients write only one.
_GZIP_MAX_MEMBERS: Final = 64
PIECE_BYTES: Final = 128 << 10
_INPUT_BYTES: Final = 32 << 10
_ZSTD_WINDOW_MAX: Final = 1 << 31  # of which only what the records fill takes memory
_ZSTD_BLOCK_MAX: Final = 128 * 1024
_ZSTD_SKIPPABLE: Final = range(0x184D2A50, 0x184D2A60)


class DecompressedTooLarge(CorruptBatch):
    """Compressed records exceed the caller's limit when decompressed."""

    def __init__(self, codec: int, *, max_bytes: int) -> None:
        super().__init__(f"{CODEC_NAMES[codec]} data decompresses to more than {max_bytes} bytes")
        self.max_bytes = max_bytes


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.zstd_compressor = zstandard.ZstdCompressor(level=3)
        self.zstd_decompressor = zstandard.ZstdDecompressor()


_per_thread = _PerThread()


def compress(codec: int, data: Buffer) -> bytes:
    """Compress `data` as one block."""
    if codec == NONE:
        return bytes(data)
    return _COMPRESSORS[codec](data)


def decompress(codec: int, data: Buffer, *, max_bytes: int = MAX_EXPANDED_BYTES) -> Buffer:
    """Decompress `data`; for codec 0 returns the same object.

    Raises DecompressedTooLarge beyond `max_bytes`, CorruptBatch for an unknown codec or bad data.
    """
    if codec == NONE:
        return data
    expand = _DECOMPRESSORS.get(codec)
    if expand is None:
        raise CorruptBatch(f"unknown codec {codec}")
    return expand(data, max_bytes)


def _gzip_compress(data: Buffer) -> bytes:
    return zlib.compress(data, wbits=31)


def _gzip_decompress(data: Buffer, max_bytes: int) -> bytes:
    members: list[bytes] = []
    left, rest = max_bytes, data
    while len(rest) or not members:
        if len(members) == _GZIP_MAX_MEMBERS:
            raise CorruptBatch(f"gzip: more than {_GZIP_MAX_MEMBERS} members")
        member = zlib.decompressobj(31)
        try:
            members.append(member.decompress(rest, left + 1))
        except zlib.error as error:
            raise CorruptBatch(f"gzip: {error}") from error
        left -= len(members[-1])
        if left < 0:
            raise DecompressedTooLarge(GZIP, max_bytes=max_bytes)
        if not member.eof:
            raise CorruptBatch("gzip: the stream is truncated")
        rest = member.unused_data
    return members[0] if len(members) == 1 else b"".join(members)


def _snappy_compress(data: Buffer) -> bytes:
    parts = [_XERIAL_HEADER]
    with memoryview(data) as view:
        for start in range(0, len(view), _XERIAL_BLOCK):
            block = bytes(cramjam.snappy.compress_raw(bytes(view[start : start + _XERIAL_BLOCK])))
            parts += (_I32.pack(len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: Buffer, max_bytes: int) -> bytes:
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _snappy_block(bytes(data), max_bytes, max_bytes)
    if len(data) < len(_XERIAL_HEADER):
        raise CorruptBatch("snappy: the stream header is truncated")
    parts: list[bytes] = []
    left, position = max_bytes, len(_XERIAL_HEADER)
    while position < len(data):
        if len(data) - position < 4:
            raise CorruptBatch("snappy: a block length is truncated")
        size = _I32.unpack_from(data, position)[0]
        position += 4
        if not 0 < size <= len(data) - position:
            raise CorruptBatch(
                f"snappy: block length is {size}, but {len(data) - position} bytes are left"
            )
        parts.append(_snappy_block(bytes(data[position : position + size]), left, max_bytes))
        left -= len(parts[-1])
        position += size
    return b"".join(parts)


def _snappy_block(block: bytes, left: int, max_bytes: int) -> bytes:
    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > SNAPPY_MAX_RATIO * len(block):
            raise CorruptBatch(f"snappy: {len(block)} bytes cannot decompress to {size}")
        if size > left:
            raise DecompressedTooLarge(SNAPPY, max_bytes=max_bytes)
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"snappy: {error}") from error


def _lz4_compress(data: Buffer) -> bytes:
    compressed: bytes = lz4.frame.compress(
        data,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        content_checksum=False,
        block_checksum=False,
        store_size=False,
    )
    return compressed


def _lz4_decompress(data: Buffer, max_bytes: int) -> bytes:
    if not _lz4_fits(data, max_bytes):
        return _lz4_decompress_to(data, max_bytes)
    try:
        expanded, used = lz4.frame.decompress(data, return_bytes_read=True)
    except (RuntimeError, ValueError) as error:
        raise CorruptBatch(f"lz4: {error}") from error
    if used < len(data):
        raise CorruptBatch("lz4: bytes after the frame")
    return expanded  # type: ignore[no-any-return]


def _lz4_fits(data: Buffer, max_bytes: int) -> bool:
    """Whether the frame's block count and declared size prove that it stays within `max_bytes`.

    | bytes | of a frame                                                                  |
    |-------|-----------------------------------------------------------------------------|
    | 0-3   | magic                                                                       |
    | 4     | flags: 16 block checksums, 8 content size, 1 dictionary id                  |
    | 5     | maximum block size in bits 4 to 6: 4 to 7 for 64 KiB to 4 MiB               |
    | 6-    | content size (8) and dictionary id (4) if present, header checksum (1), then|
    |       | blocks: size (4; highest bit: uncompressed), data, checksum. Size 0: end    |
    """
    if len(data) < 7 or _le32(data, 0) != _LZ4_MAGIC:
        return False
    flags, block_max = data[4], 1 << (8 + 2 * (data[5] >> 4 & 7))
    declared = int.from_bytes(data[6:14], "little") if flags & 8 else 0
    if declared > min(max_bytes, _LZ4_MAX_RATIO * len(data)):  # it would be allocated at once
        return False
    position = 7 + (flags & 8) + (flags & 1) * 4
    between = 4 + (flags >> 4 & 1) * 4
    left = max_bytes
    while left >= 0 and position + 4 <= len(data) and (size := _le32(data, position)):
        position += between + (size & 0x7FFF_FFFF)
        left -= block_max
    return left >= 0


def _lz4_decompress_to(data: Buffer, max_bytes: int) -> bytes:
    """Decompress with a limit. Slower, but it takes no more memory than the output."""
    frame, expanded, rest = lz4.frame.LZ4FrameDecompressor(), io.BytesIO(), data
    try:
        while not frame.eof and expanded.tell() <= max_bytes:
            piece = frame.decompress(rest, max_length=_LZ4_PIECE_BYTES)
            expanded.write(piece)
            rest = b""  # the frame keeps what it has not used
            if not piece and frame.needs_input:
                raise CorruptBatch("lz4: the frame is truncated")
    except (RuntimeError, ValueError) as error:
        raise CorruptBatch(f"lz4: {error}") from error
    if expanded.tell() > max_bytes:
        raise DecompressedTooLarge(LZ4, max_bytes=max_bytes)
    if frame.unused_data:
        raise CorruptBatch("lz4: bytes after the frame")
    return expanded.getvalue()


def _zstd_compress(data: Buffer) -> bytes:
    return _per_thread.zstd_compressor.compress(data)


def _zstd_decompress(data: Buffer, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left, position = max_bytes, 0
    while position < len(data) or not position:
        if _le32(data, position) in _ZSTD_SKIPPABLE:
            position += 8 + _le32(data, position + 4)
            continue
        end, bound = _zstd_frame(data, position)
        frame = data[position:end]
        parts.append(_zstd_expand(frame, bound=bound, left=left, max_bytes=max_bytes))
        left -= len(parts[-1])
        position = end
    if position != len(data):
        raise CorruptBatch("zstd: a skippable frame is truncated")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _le32(data: Buffer, position: int) -> int:
    return int.from_bytes(data[position : position + 4], "little")


def _zstd_frame(data: Buffer, start: int) -> tuple[int, int]:
    """(end of the frame at `start`, upper bound of its decompressed size): RFC 8878, 3.1.1."""
    try:
        parameters = zstandard.get_frame_parameters(data[start : start + 18])
        position = start + zstandard.frame_header_size(data[start : start + 18])
    except zstandard.ZstdError as error:
        raise CorruptBatch(f"zstd: {error}") from error
    bound, last = 0, False
    while not last:
        if len(data) - position < 3:
            raise CorruptBatch("zstd: the frame is truncated")
        block = int.from_bytes(data[position : position + 3], "little")
        last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        bound += size if kind != 2 else _ZSTD_BLOCK_MAX
        position += 3 + (1 if kind == 1 else size)
    position += 4 if parameters.has_checksum else 0
    if position > len(data):
        raise CorruptBatch("zstd: the frame is truncated")
    return position, bound


def zstd_window(data: Buffer) -> int:
    """The largest window of its frames: how much of the output a decompressor in pieces keeps.
    Raises CorruptBatch.
    """
    largest = position = 0
    while position < len(data):
        if _le32(data, position) in _ZSTD_SKIPPABLE:
            position += 8 + _le32(data, position + 4)
            continue
        parameters = zstandard.get_frame_parameters(data[position : position + 18])
        largest = max(largest, parameters.window_size)
        position, _ = _zstd_frame(data, position)
    return largest


def _zstd_expand(frame: Buffer, *, bound: int, left: int, max_bytes: int) -> bytes:
    """Decompress one frame. Its declared content size determines the allocation: check it first."""
    size = zstandard.frame_content_size(frame)
    if size > bound:
        raise CorruptBatch(f"zstd: the frame's blocks cannot decompress to {size} bytes")
    if size > left:
        raise DecompressedTooLarge(ZSTD, max_bytes=max_bytes)
    frames = _per_thread.zstd_decompressor
    try:
        if bound <= left or size >= 0:  # for the library, 0 means no limit
            expanded = frames.decompress(frame, max_output_size=max(bound, 1))
        else:  # slower, but tells a frame that is too large from one that is corrupt
            expanded = frames.stream_reader(frame).read(left + 1)
    except zstandard.ZstdError as error:
        raise CorruptBatch(f"zstd: {error}") from error
    if len(expanded) > left:
        raise DecompressedTooLarge(ZSTD, max_bytes=max_bytes)
    return expanded


_COMPRESSORS: Final[dict[int, Callable[[Buffer], bytes]]] = {
    GZIP: _gzip_compress,
    SNAPPY: _snappy_compress,
    LZ4: _lz4_compress,
    ZSTD: _zstd_compress,
}
_DECOMPRESSORS: Final[dict[int, Callable[[Buffer, int], bytes]]] = {
    GZIP: _gzip_decompress,
    SNAPPY: _snappy_decompress,
    LZ4: _lz4_decompress,
    ZSTD: _zstd_decompress,
}


# --- in pieces, for what is too large to expand at once -------------------------------------------


def decompress_in_pieces(codec: int, source: IO[bytes]) -> Iterator[bytes]:
    """`source`, decompressed, in pieces of about PIECE_BYTES, none of them empty. Snappy has no
    pieces. A truncated stream just ends. Raises CorruptBatch.
    """
    expand = _EXPANDERS.get(codec)
    if expand is None:
        raise CorruptBatch(f"unknown codec {codec}")
    try:
        yield from expand(source)
    except (zlib.error, zstandard.ZstdError, RuntimeError, ValueError) as error:
        raise CorruptBatch(f"the records do not decompress: {error}") from error


def _plain_pieces(source: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: source.read(PIECE_BYTES), b"")


def _gzip_pieces(source: IO[bytes]) -> Iterator[bytes]:
    member = zlib.decompressobj(31)
    data = source.read(_INPUT_BYTES)
    while data or not member.eof:
        if member.eof:
            member = zlib.decompressobj(31)
        piece = member.decompress(data, PIECE_BYTES)
        if piece:
            yield piece
        data = member.unused_data if member.eof else member.unconsumed_tail
        if not data and len(piece) < PIECE_BYTES:  # else some of it may be left in the member
            data = source.read(_INPUT_BYTES)
            if not data:
                return


def _lz4_pieces(source: IO[bytes]) -> Iterator[bytes]:
    frame = lz4.frame.LZ4FrameDecompressor()
    while not frame.eof:
        data = source.read(_INPUT_BYTES) if frame.needs_input else b""
        if frame.needs_input and not data:
            return
        piece = frame.decompress(data, max_length=PIECE_BYTES)
        if piece:
            yield piece


def _snappy_pieces(source: IO[bytes]) -> Iterator[bytes]:
    yield bytes(decompress(SNAPPY, source.read()))


def _zstd_pieces(source: IO[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
    frames = decompressor.stream_reader(source, read_across_frames=True, read_size=_INPUT_BYTES)
    return iter(lambda: frames.read(PIECE_BYTES), b"")


_EXPANDERS: Final[dict[int, Callable[[IO[bytes]], Iterator[bytes]]]] = {
    NONE: _plain_pieces,
    GZIP: _gzip_pieces,
    SNAPPY: _snappy_pieces,
    LZ4: _lz4_pieces,
    ZSTD: _zstd_pieces,
}
