"""A type that several threads meet at once: decoded, and the process lives."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from record_format import typed_json

ROOT = Path(__file__).parents[3]
ROOMS = [
    "record_format",
    "hot_tier",
    "cold_tier",
    "manifest",
    "broker",
    "api",
    "spark_reader",
    "tierlog",
]

# Without the lock about every other run dies with SIGSEGV.
EIGHT_THREADS = """
import sys, threading, msgspec
from record_format import typed_json

sys.setswitchinterval(1e-6)

def decode(kind, start):
    start.wait()
    assert typed_json.decode(b'{"a": [{"x": 1}], "b": {}}', kind).a[0].x == 1

for _ in range(400):
    inner = msgspec.defstruct("Inner", [("x", int)])
    fields = [("a", tuple[inner, ...]), ("b", dict[str, inner]), ("c", int | None, None)]
    kind, start = msgspec.defstruct("Outer", fields), threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=(kind, start)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_eight_threads_meet_a_type_at_once():
    ran = subprocess.run(
        [sys.executable, "-c", EIGHT_THREADS], check=False, cwd=ROOT, capture_output=True
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_no_room_lets_msgspec_meet_a_type_where_threads_run():
    told = re.compile(r"json\.decode\((?:[^()]|\([^()]*\))*type=")
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [str(path) for path in files if told.search(path.read_text())] == []


class Point(msgspec.Struct):
    x: int


class Named(Point):
    name: str


def test_errors_are_msgspecs_own():
    assert typed_json.decode(b'{"x": 3}', Point) == Point(3)
    with pytest.raises(msgspec.ValidationError):
        typed_json.decode(b'{"x": "3"}', Point)
    with pytest.raises(msgspec.DecodeError):
        typed_json.decode(b'{"x": 3', Point)


def test_bytes_that_are_no_text_are_no_json():
    with pytest.raises(msgspec.DecodeError, match="utf-8"):
        typed_json.decode(b'{"x": 3, "name": "\xff"}', Named)
