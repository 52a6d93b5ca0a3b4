"""docs/guides/schemas.md runs as printed, except for the addresses."""

import re
from pathlib import Path

import pytest

from tests.fakes.served_broker import Served

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "schemas.md"


def test_the_guide_runs_as_printed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.broker.create_topic("flights")
    namespace: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    for code in blocks:
        placed = code.replace("http://127.0.0.1:8640", served.server.url)
        placed = placed.replace("127.0.0.1:9092", f"127.0.0.1:{served.kafka_port}")
        exec(compile(placed, GUIDE.name, "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    row = "{'carrier': 'UA', 'delay': 2}"
    assert printed == [row, f"[{{'value': {row}}}]"]
    namespace["registry"].__exit__()  # type: ignore[attr-defined]
