import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest

from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import Console, open_console
from tierlog.api.console import downloads
from tierlog.api.http.settings import HttpSettings

RECORDS: list[dict[str, Any]] = [
    {"key": "a", "value": {"n": 1}, "timestamp": 1_372_900_000_005},
    {"key": "b", "value": 'two\nlines, "quoted"', "headers": [{"name": "kind", "value": "late"}]},
    {"key_base64": "/wA=", "value_base64": "AP8="},
    {"key": None, "value": None},
    {"key": "", "value": "é"},
]


@pytest.fixture(scope="module")
def topic(console: Console) -> str:
    topic = console.topic("downloaded", partitions=2, retention_ms=-1)
    path = f"/v1/topics/{topic}/partitions/1/records"
    assert console.post(path, json={"records": RECORDS}).status_code == 200
    return topic


def download(console: Console, topic: str, **query: Any) -> bytes:
    params = {"order": "oldest", **query}
    response = console.get(f"/console/topics/{topic}/download", params=params)
    assert response.status_code == 200, response.text
    name = f"{topic}.{query.get('format', 'ndjson')}"
    assert response.headers["content-disposition"] == f'attachment; filename="{name}"'
    return response.content


def test_lines_of_json_are_those_of_the_api(console: Console, topic: str) -> None:
    found = download(console, topic)
    headers = {"accept": "application/x-ndjson"}
    path = f"/v1/topics/{topic}/partitions/1/records?encoding=json"
    assert found == console.get(path, headers=headers).content
    assert [json.loads(line)["offset"] for line in found.splitlines()] == [0, 1, 2, 3, 4]


def test_a_table_keeps_bytes_apart_from_text(console: Console, topic: str) -> None:
    rows = list(csv.DictReader(io.StringIO(download(console, topic, format="csv").decode())))
    assert rows[0]["timestamp"] == "2013-07-04T01:06:40.005Z"
    assert [row["value"] for row in rows] == ['{"n":1}', 'two\nlines, "quoted"', "", "", "é"]
    assert base64.b64decode(rows[2]["value_base64"]) == b"\0\xff"
    assert json.loads(rows[1]["headers"]) == [{"name": "kind", "value": "late"}]
    assert {(row["partition"], row["offset"]) for row in rows} == {("1", str(n)) for n in range(5)}


def test_parquet_has_the_columns_of_sparks_source(console: Console, topic: str) -> None:
    table = pq.read_table(io.BytesIO(download(console, topic, format="parquet")))
    assert table["key"].to_pylist() == [b"a", b"b", b"\xff\0", None, b""]
    assert table["value"].to_pylist()[2:] == [b"\0\xff", None, "é".encode()]
    assert table["offset"].to_pylist() == [0, 1, 2, 3, 4]
    assert set(table["topic"].to_pylist()) == {topic}
    assert table["headers"].to_pylist()[1] == [{"key": "kind", "value": b"late"}]
    assert table["timestamp"][0].as_py().isoformat() == "2013-07-04T01:06:40.005000+00:00"


@pytest.mark.parametrize("file_format", ["ndjson", "csv", "parquet"])
def test_many_records_are_a_whole_file(console: Console, file_format: str) -> None:
    topic = f"many-downloaded-{file_format}"
    if not console.get(f"/v1/topics/{topic}").is_success:
        console.topic(topic)
        for start in range(0, 30_000, 10_000):
            console.produce(topic, *({"value": str(n)} for n in range(start, start + 10_000)))
    rest = {"limit": 10_000, "after": "0:15000"}
    found = download(console, topic, format=file_format, **rest)
    if file_format == "parquet":
        values = [one.decode() for one in pq.read_table(io.BytesIO(found))["value"].to_pylist()]
    elif file_format == "csv":
        values = [row["value"] for row in csv.DictReader(io.StringIO(found.decode()))]
    else:
        values = [str(json.loads(line)["value"]) for line in found.splitlines()]
    assert values == [str(n) for n in range(15_000, 25_000)]


def test_a_download_that_its_budget_ends_is_cut_short(tmp_path: Path) -> None:
    with open_console(tmp_path, http=HttpSettings(search_max_bytes=1)) as console:
        topic = console.topic("cut-short")
        for _ in range(3):
            console.produce(topic, {"value": "x" * 900_000})
        with pytest.raises(httpx2.RemoteProtocolError):
            console.get(f"/console/topics/{topic}/download")


def test_without_pyarrow_parquet_says_what_to_install(
    console: Console, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "has_parquet", lambda: False)
    response = console.get(f"/console/topics/{topic}/download", params={"format": "parquet"})
    assert response.status_code == 400
    assert "pip install 'tierlog[arrow]'" in response.json()["detail"]


@pytest.mark.parametrize(
    ("page", "count"),
    [("search?text=two", 1), ("search?limit=3", 3), ("partitions/1/records?at=1&limit=2", 2)],
)
def test_what_a_page_shows_is_saved_by_the_browser(
    browser: Chromium, console: Console, topic: str, tmp_path: Path, page: str, count: int
) -> None:
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(f"{console.url}/#/topics/{topic}/{page}")
    button = "document.querySelector('[data-download]')"
    browser.until(f"{button}?.dataset.download && {button}.offsetParent")
    browser.run(
        f"document.querySelector('[data-downloads] select').value = 'csv'; {button}.click()"
    )
    browser.until("document.querySelector('#said').textContent.startsWith('Downloaded')")
    saved = tmp_path / f"{topic}.csv"
    until(saved.exists)
    assert len(list(csv.DictReader(io.StringIO(saved.read_text())))) == count
