"""Every piece of Python in the client's guide runs as it is printed, but for the address."""

import re
from pathlib import Path

import pytest

from tests.integration.http.conftest import Api

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "python-client.md"


def test_the_guide_runs_as_it_is_printed(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, object] = {}
    pieces = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    for code in pieces:
        address = str(api.base_url).rstrip("/")
        exec(compile(code.replace("http://127.0.0.1:8640", address), GUIDE.name, "exec"), known)
    told = capsys.readouterr().out
    assert told.count("b'tea'") == 2, "by itself, and for the group"
    assert "lag=0" in told
    assert told.endswith("oders\n")
    known["client"].close()  # type: ignore[attr-defined]
