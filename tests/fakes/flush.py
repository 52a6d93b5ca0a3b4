"""A flush that costs nothing: in the tests' own process, fsync and fdatasync only check the file.

Flushing takes up to half the time of tests that open logs, and no test can see its effect: what a
process wrote survives the process, flushed or not. What is flushed, when, and what follows if a
flush fails is tested where the calls are recorded or made to fail. Brokers in processes of their
own, as in the crash tests, do flush.
"""

from __future__ import annotations

import os
from typing import Final

fsync: Final = os.fsync  # for tests that need clean pages


def check_file(fd: int) -> None:
    os.fstat(fd)
