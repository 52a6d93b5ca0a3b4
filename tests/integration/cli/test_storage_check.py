"""`tierlog storage verify`, through a broker and directly on the bucket."""

import json
import os
import shutil

import pytest

from tests.fakes.forked import Forked
from tierlog.cli.storage import print_report


def test_verify_exits_0_for_an_intact_topic_and_3_for_a_missing_object(broker, tierlog, offline):
    tierlog.ok("topic", "create", "v")
    tierlog.ok("produce", "v", stdin=b"one\ntwo\n")
    tierlog.ok("storage", "offload", "v")
    assert json.loads(tierlog.ok("storage", "verify", "v", "--deep"))["ok"] is True
    (log,) = broker.folder.glob("**/topics/v/*/0/segments/*.log")
    url = f"file://{str(log).partition('/topics/')[0]}"
    direct = offline.run("storage", "verify", "v", "--store", url, "--deep", "--output", "text")
    assert (direct.returncode, direct.stdout) == (0, b"")
    assert b"ok; checked 1 partition," in direct.stderr
    assert direct.stderr.endswith(b"B read\n")
    content = log.read_bytes()
    log.unlink()
    for run in (
        tierlog.run("storage", "verify", "v"),
        offline.run("storage", "verify", "v", "--store", url),
    ):
        assert run.returncode == 3
        (problem,) = json.loads(run.stdout)["problems"]
        assert (problem["kind"], problem["object_key"]) == ("object-missing", str(log))
    log.write_bytes(content)


def test_verify_and_list_continue_past_a_broken_topic(broker, tierlog, offline, tmp_path):
    for name in ("all-1", "all-2"):
        tierlog.ok("topic", "create", name, "--config", "segment.bytes=1048576")
        tierlog.ok("produce", name, stdin=b"one\ntwo\n")
        tierlog.ok("storage", "offload", name)
    report = json.loads(tierlog.ok("storage", "verify"))
    assert (
        report["ok"] is report["topics"]["all-1"]["ok"] is report["topics"]["all-2"]["ok"] is True
    )
    assert b"all-2: ok; checked" in tierlog.run("storage", "verify", "--output", "text").stderr

    (cluster,) = broker.folder.glob("**/cluster.json")
    bucket = shutil.copytree(cluster.parent, tmp_path / "bucket")
    store = ("--store", f"file://{bucket}")
    listing = ("topic", "list", "--prefix", "all-")
    assert offline.ok(*listing, *store) == tierlog.ok(*listing)
    assert json.loads(offline.ok("storage", "verify", *store))["ok"] is True
    (topic,) = bucket.glob("topics/all-1/*/topic")
    shutil.rmtree(topic)
    run = offline.run(*listing, *store)
    assert (run.returncode, b"the topic object, which" in run.stderr) == (3, True)
    assert [topic["name"] for topic in json.loads(run.stdout)["topics"]] == ["all-2"]
    run = offline.run("storage", "verify", *store)
    report = json.loads(run.stdout)["topics"]
    assert (run.returncode, report["all-1"]["ok"], report["all-2"]["ok"]) == (3, False, True)
    assert "the topic object, which" in report["all-1"]["error"]
    error = offline.fails(1, "storage", "segments", "all-1", *store)
    assert "the topic object, which" in error


def test_an_empty_store_is_an_error_for_list_and_verify(offline, tmp_path):
    store = ("--store", f"file://{tmp_path}")
    for command in (("topic", "list"), ("storage", "verify")):
        assert "holds no cluster" in offline.fails(1, *command, *store)


def test_verify_of_an_unknown_topic_is_one_line(offline, tmp_path):
    error = offline.fails(1, "storage", "verify", "nobody", "--store", f"file://{tmp_path}")
    assert "nobody" in error


def test_verify_shows_progress_on_a_terminal(broker, tierlog):
    tierlog.ok("topic", "create", "watched")
    screen, terminal = os.openpty()
    try:
        process = Forked(
            ["storage", "verify", "watched", "--deep"],
            stdout=terminal,
            stderr=terminal,
            env=tierlog.environment | {"TERM": "xterm"},
        )
        assert process.wait(60) == 0
        shown = os.read(screen, 4096)
        assert b"verify watched, by the broker" in shown
        assert b"0/?" not in shown, "how much there is to verify is not known"
    finally:
        os.close(terminal)
        os.close(screen)


@pytest.mark.parametrize(("left_out", "expected"), [(0, "v: 1 problem;"), (7, "v: 8 problems;")])
def test_omitted_problems_are_counted(left_out, expected, capsys):
    problem = {"kind": "object-missing", "partition": 0, "object_key": "x", "detail": "gone"}
    report = {"ok": False, "problems": [problem], "problems_left_out": left_out, "checked": {}}
    print_report("v", report)
    assert expected in capsys.readouterr().err
