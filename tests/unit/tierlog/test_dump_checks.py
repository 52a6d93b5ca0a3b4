"""`dump --verify` finds no problem in Kafka's files, and every damage."""

import shutil
from pathlib import Path

import pytest

from tests.unit.record_format import golden
from tierlog.cli.dump_checks import find_problems
from tierlog.cli.dump_reader import Problem, UnknownFileKind, read_items

FIXTURES = golden.ROOT
FILES = sorted(
    path
    for path in FIXTURES.rglob("*")
    if path.is_file()
    and ".dumps" not in str(path)
    and (
        path.suffix in {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
        or path.name.endswith(("checkpoint", "metadata", ".properties"))
    )
)


def test_verify_finds_no_problem_in_kafkas_files():
    assert len(FILES) > 400
    assert [problem for file in FILES for problem in find_problems(file)] == []


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FIXTURES / "txn-0", tmp_path / "txn-0"))


def damage(path: Path, position: int, *, size: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position : position + size] = bytes(
        byte ^ 0x5A for byte in data[position : position + size]
    )
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "position", "message"),
    [
        ("00000000000000000000.log", 100, "checksum"),
        ("00000000000000000000.log", 443, "magic"),
        ("00000000000000000000.index", 7, "position"),
        ("00000000000000000000.timeindex", 7, "timestamp"),
        ("00000000000000000000.txnindex", 1, "version"),
        ("00000000000000000079.snapshot", 20, "checksum"),
        ("leader-epoch-checkpoint", 0, "not a number"),
    ],
)
def test_verify_finds_a_flipped_byte(folder, name, position, message):
    damage(folder / name, position)
    problems = list(find_problems(folder / name))
    assert problems
    assert message in problems[0].detail
    assert problems[0].file == name


def test_a_file_truncated_while_it_is_read_is_a_problem_and_no_sigbus(tmp_path):
    source = (FIXTURES / "big-batch-0" / f"{0:020d}.log").read_bytes()
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(source * (1 + (4 << 20) // len(source)))
    items = read_items(log)
    next(items), next(items)
    with log.open("r+b") as file:
        file.truncate(100)
    *_, last = [item for item in items if isinstance(item, Problem)]
    assert "invalid bytes at the end" in last.detail


def test_verify_finds_a_truncated_tail(folder):
    log = folder / "00000000000000000000.log"
    log.write_bytes(log.read_bytes()[:-5])
    assert "invalid bytes at the end" in next(find_problems(log)).detail


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (b"\0\0\0", "3 bytes of a partial entry at the end"),
        (bytes(24) + b"\1" * 12, "after the entries"),
    ],
)
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_verify_finds_garbage_after_the_entries_of_an_index(folder, suffix, tail, message):
    index = folder / f"{0:020d}{suffix}"
    index.write_bytes(index.read_bytes() + bytes(24))  # as preallocated
    assert list(find_problems(index)) == []
    index.write_bytes(index.read_bytes()[:-24] + tail)
    assert any(message in problem.detail for problem in find_problems(index))


def test_verify_finds_entries_past_the_end_of_the_log(folder):
    log = folder / "00000000000000000000.log"
    log.write_bytes(b"")
    assert "past the end" in next(find_problems(log.with_suffix(".index"))).detail


def test_an_unknown_kind_of_file_is_refused_by_name(tmp_path):
    with pytest.raises(UnknownFileKind, match="notes"):
        list(read_items(tmp_path / "notes.txt"))
