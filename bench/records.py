"""The records of all benchmarks: the same bytes on every machine and in every run."""

from __future__ import annotations

import random
from typing import Final

from tierlog.record_format.batch import HEADER_SIZE
from tierlog.record_format.encode import encode_batch

START_MS: Final = 1_700_000_000_000
TOPIC_ID: Final = "MjD0UKSJT2qa6zQLS6M5HA"
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789     "


def texts(count: int, size_bytes: int, *, seed: int = 1) -> list[bytes]:
    """ASCII texts of `size_bytes` that compress about as well as prose."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_ALPHABET, k=rng.randint(3, 9))) for _ in range(4000)]
    result = []
    for _ in range(count):
        text = " ".join(rng.choices(words, k=size_bytes // 4 + 1))
        result.append(text[:size_bytes].encode())
    return result


def batch_of_size(size_bytes: int) -> bytes:
    """One uncompressed batch of exactly `size_bytes`, of records of about 1 KiB."""
    count = max(1, (size_bytes - HEADER_SIZE) // (1024 + 12))
    values = texts(min(count, 64), 1024, seed=size_bytes)
    values = [values[number % len(values)] for number in range(count)]
    times = [START_MS + number for number in range(count)]
    batch = encode_batch(values, timestamps=times)
    while len(batch) != size_bytes:
        last = len(values[-1]) + size_bytes - len(batch)
        values[-1] = (values[-1] + b"x" * last)[:last]
        batch = encode_batch(values, timestamps=times)
    return bytes(batch)
