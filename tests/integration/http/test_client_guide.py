"""Every Python block of the client guide runs as printed, except for the address."""

import re
from pathlib import Path

import pytest

from tests.integration.http.conftest import Api

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "python-client.md"


def test_the_guide_runs_as_printed(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    for code in blocks:
        address = str(api.base_url).rstrip("/")
        exec(compile(code.replace("http://127.0.0.1:8640", address), GUIDE.name, "exec"), namespace)
    printed = capsys.readouterr().out
    assert printed.count("b'tea'") == 3, "without a group, and with two"
    assert "lag=0" in printed
    assert printed.endswith("oders\n")
    namespace["client"].close()  # type: ignore[attr-defined]
