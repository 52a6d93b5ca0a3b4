"""Interleaved rounds: every contender once per round, in turn, so that other load on the machine
affects all of them.

The first round is a warm-up (page cache, compiled kernels, lazily created files) and is discarded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def interleave(contenders: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Call each in turn, `rounds` times over. Returns all results by contender."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        for name, run in contenders.items():
            result = run()
            if number >= 0:
                results[name].append(result)
    return results


def wall_seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def cpu_seconds_of(pid: int) -> float:
    """User and system time of a process and all its threads, in seconds, in steps of a tick."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_tree(pid: int) -> float:
    """As `cpu_seconds_of`, of a process and all its descendants, including those that ended."""
    spent = [sum(map(int, fields[11:15])) for fields in process_tree(pid).values()]
    return sum(spent) / os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> dict[int, list[bytes]]:
    """A process and all its descendants: by id, what its `/proc/ID/stat` says after its name."""
    every = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended meanwhile; whoever waited for it has its time
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                every[int(folder.name)] = fields
    tree, found = {pid}, 0
    while len(tree) > found:
        found = len(tree)
        tree |= {child for child, fields in every.items() if int(fields[1]) in tree}
    return {one: every[one] for one in tree & every.keys()}


def resident_mib_of(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux reports a process's resident set")
