"""Every block of the README and of the tour that follows it runs, against one broker. The block for
Spark runs in `spark/test_guides.py`.
"""

import shutil

import pytest

from tests.fakes.command_line import ROOT, RunningBroker
from tests.fakes.page_blocks import Shell, blocks_of

PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "tour.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page) if block[0] != "shown"]
SPARK = 2  # index of its block


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    running = RunningBroker("dev", "--port", "0", cwd=folder)
    yield Shell(folder, running.server)
    assert running.stop() == 0


@pytest.fixture(scope="module")
def outputs(tour):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    return [
        tour.run(kind, script)
        for index, (kind, script) in enumerate(BLOCKS)
        if kind != "serve" and index != SPARK
    ]


def test_the_tour_runs_as_printed(outputs):
    assert [kind for kind, _ in BLOCKS] == ["serve", "run", "python", "run", "run", "python"]
    assert "\ntierlog dev " in BLOCKS[0][1]
    first, curl, shown, python = outputs
    assert '"value":"1000"' in first
    assert '"remaining_segments":0' in first
    assert '"records":2' in curl
    assert "just text" in curl
    assert "offset-past-end" in curl
    assert '"records":20000' in shown
    assert '"remaining_segments":0' in shown
    assert "cold" in shown
    assert "Dumping " in shown
    assert "RecordMetadata(topic='orders', partition=1, offset=9989)" in python
    assert "\n5000 b'customer-" in python
