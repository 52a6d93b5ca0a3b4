"""Which raw batches may be checked on the event loop: none of unknown expanded size."""

import pytest

from tierlog.api.serving.produced_batches import is_small_uncompressed_batch
from tierlog.record_format import codecs
from tierlog.record_format.encode import encode_batch


def batch(count: int = 3, codec: int = codecs.NONE) -> bytes:
    return bytes(encode_batch([b"v" * 50] * count, timestamps=[1] * count, codec=codec))


def test_one_uncompressed_batch_is_recognized() -> None:
    assert is_small_uncompressed_batch(batch())
    assert is_small_uncompressed_batch(bytearray(batch(4096)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 200,
        batch()[:-1],
        batch() + b"x",
        batch() + batch(codec=codecs.LZ4),
        batch(codec=codecs.ZSTD),
        batch(4097),
    ],
    ids=["empty", "no-batch", "cut", "more", "a-compressed-one-behind", "compressed", "many"],
)
def test_other_bodies_are_not_recognized(body: bytes) -> None:
    assert not is_small_uncompressed_batch(body)
