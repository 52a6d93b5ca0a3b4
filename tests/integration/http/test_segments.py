import itertools
from pathlib import Path

import pytest

from tests.integration.http.conftest import Api, api_of, problem, records_path, take_over
from tierlog.record_format.crc32c import crc32c_of


def partition_path(topic: str) -> str:
    return f"/v1/topics/{topic}/partitions/0"


def test_listed_segments_cover_the_log_across_pages(api: Api) -> None:
    topic = api.cold_topic()
    listed = api.get(partition_path(topic) + "/segments").json()
    assert listed["next_from_offset"] is None
    segments = listed["segments"]
    assert segments[0]["base_offset"] == 0
    for segment, following in itertools.pairwise(segments):
        assert segment["last_offset"] + 1 == following["base_offset"]
    assert {segment["tier"] for segment in segments} >= {"cold"}
    assert all(len(segment["crc32c"]) == 8 for segment in segments if not segment["active"])
    paged, start = [], 0
    while start is not None:
        page = api.get(
            partition_path(topic) + "/segments", params={"limit": 3, "from_offset": start}
        ).json()
        assert len(page["segments"]) <= 3
        paged += page["segments"]
        start = page["next_from_offset"]
    assert paged == segments
    problem(api.get(partition_path(topic) + "/segments?limit=10001"), 400, "invalid-request")


def test_small_segments_of_the_bucket_are_merged_step_by_step(api: Api) -> None:
    topic = api.cold_topic()
    partition = api.broker.partition(topic, 0)
    partition.upkeep.delete_local(partition.cold_end_offset)
    before, records = list(partition.cold_entries(0)), api.fetch(topic, offset="earliest").json()
    assert len(before) >= 4
    size = {"segment.bytes": 2 * before[0].size_bytes}
    api.patch(f"/v1/topics/{topic}", json={"config": size}).raise_for_status()
    left = len(before)
    while left:
        done = api.post(f"/v1/topics/{topic}/merge").json()
        assert (done["merged_segments"], done["new_segments"]) == (2, 1)
        assert done["remaining_segments"] == max(0, left - 2) // 2 * 2
        left = done["remaining_segments"]
    assert len(list(partition.cold_entries(0))) == -(-len(before) // 2)
    nothing = api.post(f"/v1/topics/{topic}/merge?wait_ms=1").json()
    assert set(nothing.values()) == {0}
    assert api.fetch(topic, offset="earliest").json() == records
    problem(api.post("/v1/topics/nowhere/merge"), 404, "unknown-topic")


def test_no_other_site_may_use_a_segment_and_no_browser_guess_what_it_is(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "<script>alert(1)</script>")
    path = partition_path(topic) + "/segments/0"
    whole = api.get(path)
    etag = {"if-none-match": whole.headers["etag"]}
    for response in (whole, api.head(path), api.get(path, headers=etag)):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"


def test_the_segment_count_of_a_topic_matches_the_list(api: Api) -> None:
    """Also with an empty active segment, and with segments below the log start."""

    def counted_and_listed() -> tuple[int, int]:
        (shown,) = api.get(f"/v1/topics/{topic}").json()["partitions"]
        listed = api.get(partition_path(topic) + "/segments").json()["segments"]
        tiers = [segment["tier"] for segment in listed]
        (report,) = [
            one for one in api.get("/v1/storage").json()["topics"] if one["topic"] == topic
        ]
        assert report["segments"] == shown["segments"]
        assert report["hot_segments"] == tiers.count("hot") + tiers.count("both")
        assert report["cold_segments"] == tiers.count("cold") + tiers.count("both")
        return shown["segments"], len(listed)

    topic = api.topic()
    assert counted_and_listed() == (0, 0)
    topic = api.cold_topic()
    counted, listed = counted_and_listed()
    assert counted == listed > 2
    second = api.get(partition_path(topic) + "/segments").json()["segments"][1]["base_offset"]
    trim = {"before_offset": second + 1}
    assert api.post(partition_path(topic) + "/trim", json=trim).status_code == 200
    assert counted_and_listed() == (listed - 1, listed - 1)
    api.post(f"/v1/topics/{topic}/offload?wait_ms=20000")
    counted, listed = counted_and_listed()
    assert counted == listed


def test_a_segment_is_served_through_a_cache_of_one_chunk(tmp_path: Path) -> None:
    """Each chunk is released before the next is fetched."""
    with api_of(tmp_path, cache_bytes=1, chunk_bytes=512) as api:
        topic = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1)
        for value in range(20):
            api.values(topic, f"{value:0400}")
        api.post(f"/v1/topics/{topic}/offload?wait_ms=20000")
        segment = api.get(partition_path(topic) + "/segments").json()["segments"][0]
        body = api.get(partition_path(topic) + "/segments/0").content
        assert segment["tier"] == "cold"
        assert len(body) == segment["size_bytes"] > 6 * 512
        assert f"{crc32c_of(body):08x}" == segment["crc32c"]


def test_a_cold_segment_supports_range_and_conditional_requests(api: Api) -> None:
    topic = api.cold_topic()
    segment = api.get(partition_path(topic) + "/segments").json()["segments"][0]
    assert segment["tier"] == "cold"
    path = partition_path(topic) + "/segments/0"
    whole = api.get(path)
    assert whole.status_code == 200
    assert len(whole.content) == segment["size_bytes"]
    etag = whole.headers["etag"]
    assert whole.headers["cache-control"] == "private, no-cache"
    assert whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["vary"] == "accept"
    size = len(whole.content)
    for header, start, end in (
        ("bytes=0-9", 0, 10),
        ("bytes=10-", 10, size),
        ("bytes=-7", size - 7, size),
        (f"bytes={size - 1}-{size + 500}", size - 1, size),
    ):
        part = api.get(path, headers={"range": header})
        assert part.status_code == 206
        assert part.content == whole.content[start:end]
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    assert api.get(path, headers={"range": "bytes=5-2"}).status_code == 200
    assert api.get(path, headers={"range": "lines=1-2"}).status_code == 200
    assert api.get(path, headers={"range": "bytes=0-1,4-5"}).content == whole.content
    assert api.get(path, headers={"range": "bytes=0-1", "if-range": etag}).status_code == 206
    assert api.get(path, headers={"range": "bytes=0-1", "if-range": '"other"'}).status_code == 200
    for tags in (etag, f'"x", W/{etag}', "*"):
        unchanged = api.get(path, headers={"if-none-match": tags})
        assert unchanged.status_code == 304
        assert unchanged.headers["etag"] == etag
        assert unchanged.content == b""
    assert api.get(path, headers={"if-none-match": '"x"'}).status_code == 200
    for tags in (etag, f'"x", {etag}', "*"):
        assert api.get(path, headers={"if-match": tags}).content == whole.content
    for tags in ('"x"', f"W/{etag}"):
        problem(api.get(path, headers={"if-match": tags}), 412, "precondition-failed")
    head = api.head(path, headers={"range": "bytes=0-9"})
    assert (head.status_code, head.headers["content-length"], head.content) == (206, "10", b"")
    refused = api.get(path, headers={"range": f"bytes={size}-"})
    problem(refused, 416, "range-not-satisfiable")
    assert refused.headers["content-range"] == f"bytes */{size}"


def test_a_head_of_a_cold_segment_reads_none_of_its_bytes(api: Api) -> None:
    topic = api.cold_topic()
    segment = api.get(partition_path(topic) + "/segments").json()["segments"][0]
    api.broker.bucket.cache.shrink(1 << 30)
    api.store.go_down()
    try:
        head = api.head(partition_path(topic) + "/segments/0")
    finally:
        api.store.heal()
    assert (head.status_code, head.headers.get("log-tier")) == (200, "cold")
    assert head.headers["content-length"] == str(segment["size_bytes"])


def test_the_active_segment_is_served_up_to_the_high_watermark(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a")
    first = api.get(partition_path(topic) + "/segments/0")
    api.values(topic, "b")
    second = api.get(partition_path(topic) + "/segments/0")
    assert second.content.startswith(first.content)
    assert len(second.content) > len(first.content)
    assert first.headers["etag"] != second.headers["etag"]


def test_an_unknown_segment_is_404(api: Api) -> None:
    topic = api.topic()
    problem(api.get(partition_path(topic) + "/segments/7"), 404, "unknown-segment")
    problem(api.get(partition_path(topic) + "/segments/-7"), 404, "unknown-segment")
    problem(api.get(partition_path(topic) + "/segments/x"), 400, "invalid-request")


def test_a_trimmed_segment_is_404_before_it_is_deleted_from_the_bucket(
    api: Api, request: pytest.FixtureRequest
) -> None:
    topic = api.cold_topic()
    first, second = api.get(partition_path(topic) + "/segments?limit=2").json()["segments"]
    segment_paths = [
        f"{partition_path(topic)}/segments/{one['base_offset']}" for one in (first, second)
    ]
    assert [api.get(path).headers["log-tier"] for path in segment_paths] == ["cold", "cold"]
    request.getfixturevalue("store_down")
    api.post(partition_path(topic) + "/trim", json={"before_offset": second["base_offset"] + 1})
    assert [api.get(path).status_code for path in segment_paths] == [404, 200]


def test_the_manifest_and_its_earlier_versions_are_served(api: Api) -> None:
    topic = api.cold_topic()
    manifest = api.get(partition_path(topic) + "/manifest").json()
    assert manifest["version"] >= 1
    assert manifest["leader_epoch"] >= 1
    assert manifest["owner"]
    assert manifest["log_start_offset"] == 0
    assert manifest["segments"][0]["base_offset"] == 0
    older = api.get(partition_path(topic) + "/manifest", params={"version": 1})
    assert older.json()["version"] == 1
    page = api.get(partition_path(topic) + "/manifest", params={"limit": 1}).json()
    assert len(page["segments"]) == 1
    assert page["next_from_offset"] == manifest["segments"][1]["base_offset"]
    problem(
        api.get(partition_path(topic) + "/manifest?version=99999"), 404, "unknown-manifest-version"
    )


def test_a_topic_that_stays_local_says_why_it_has_no_manifest(api: Api) -> None:
    topic = api.topic(remote_storage_enable=False)
    refused = problem(api.get(partition_path(topic) + "/manifest"), 404, "unknown-manifest-version")
    assert "remote.storage.enable=false" in refused["detail"]


def test_offsets_can_be_looked_up_by_timestamp(api: Api) -> None:
    topic = api.topic(retention_ms=-1)
    api.produce(topic, {"value": "a", "timestamp": 1000}, {"value": "b", "timestamp": 2000})
    path = partition_path(topic) + "/offsets"
    assert api.get(path).json()["high_watermark"] == 2
    assert api.get(path, params={"timestamp": 1001}).json() == {"offset": 1, "timestamp": 2000}
    assert api.get(path, params={"timestamp": "1970-01-01T00:00:01Z"}).json() == {
        "offset": 0,
        "timestamp": 1000,
    }
    assert api.get(path, params={"timestamp": 2001}).json() == {"offset": None, "timestamp": None}


def test_a_partition_that_lost_leadership_reports_no_offsets(tmp_path: Path) -> None:
    with api_of(tmp_path) as api:
        topic = api.topic()
        api.values(topic, "a", "b")
        take_over(api, topic, tmp_path)
        for query in ("", "?timestamp=0", "?timestamp=9999999999999"):
            problem(api.get(partition_path(topic) + "/offsets" + query), 409, "leadership-lost")
        for offset in (0, 2, 9):  # nor in an error that names the log end
            problem(api.get(records_path(topic), params={"offset": offset}), 409, "leadership-lost")


def test_a_partition_that_lost_leadership_reports_neither_segments_nor_a_manifest(
    tmp_path: Path,
) -> None:
    with api_of(tmp_path) as api:
        topic = api.topic()
        api.values(topic, "a", "b")
        api.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
        version = api.get(partition_path(topic) + "/manifest").json()["version"]
        take_over(api, topic, tmp_path)
        # It would report a manifest as in force that the new owner has replaced.
        for path in ("/segments", "/segments/0", "/manifest", f"/manifest?version={version}"):
            problem(api.get(partition_path(topic) + path), 409, "leadership-lost")
