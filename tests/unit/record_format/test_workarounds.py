"""Decoding a new type in several threads at once does not crash the process."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tierlog.record_format.workarounds import decode_json

ROOT = Path(__file__).parents[3]
PACKAGES = [
    "record_format",
    "hot_tier",
    "cold_tier",
    "manifest",
    "broker",
    "api",
    "spark_reader",
    "tierlog",
]

# Without the lock about every second run dies with SIGSEGV.
EIGHT_THREADS = """
import sys, threading, msgspec
from tierlog.record_format.workarounds import decode_json

sys.setswitchinterval(1e-6)

def decode(kind, start):
    start.wait()
    assert decode_json(b'{"a": [{"x": 1}], "b": {}}', kind).a[0].x == 1

for _ in range(400):
    inner = msgspec.defstruct("Inner", [("x", int)])
    fields = [("a", tuple[inner, ...]), ("b", dict[str, inner]), ("c", int | None, None)]
    kind, start = msgspec.defstruct("Outer", fields), threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=(kind, start)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_eight_threads_decode_a_new_type_at_once():
    completed = subprocess.run(
        [sys.executable, "-c", EIGHT_THREADS], check=False, cwd=ROOT, capture_output=True
    )
    assert (completed.returncode, completed.stderr) == (0, b"")


def test_no_package_decodes_typed_json_with_msgspec_directly():
    typed_decode = re.compile(r"json\.decode\((?:[^()]|\([^()]*\))*type=")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [str(path) for path in files if typed_decode.search(path.read_text())] == []


class Point(msgspec.Struct):
    x: int


class Named(Point):
    name: str


def test_errors_are_those_of_msgspec():
    assert decode_json(b'{"x": 3}', Point) == Point(3)
    with pytest.raises(msgspec.ValidationError):
        decode_json(b'{"x": "3"}', Point)
    with pytest.raises(msgspec.DecodeError):
        decode_json(b'{"x": 3', Point)


def test_invalid_utf8_is_refused():
    with pytest.raises(msgspec.DecodeError, match=r"(?i)utf-8"):
        decode_json(b'{"x": 3, "name": "\xff"}', Named)


def test_json_that_is_nested_too_deeply_is_refused():
    with pytest.raises(msgspec.DecodeError, match="recursion"):
        decode_json(b"[" * 100_000, msgspec.Raw)
