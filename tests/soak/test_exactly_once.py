"""An exactly-once copy through the Kafka listener, under kill -9 of broker and copier."""

import time
from itertools import count
from pathlib import Path

import pytest

from tests.fakes.copying import copy_under_kills
from tests.fakes.soak import MINUTES


@pytest.mark.soak
def test_each_record_is_copied_once_and_in_order(tmp_path: Path) -> None:
    end = time.monotonic() + MINUTES * 60
    for number in count():
        root = tmp_path / f"{number}"
        root.mkdir()
        copy_under_kills(root, kills=30, records=6000)
        if time.monotonic() > end:
            return
