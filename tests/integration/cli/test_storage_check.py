"""`tierlog storage verify`, through a broker and on the bucket alone."""

import json
import os
import shutil

import pytest

from tests.fakes.forked import Forked
from tierlog.cli.storage_check import print_report


def test_verify_exits_0_where_all_is_there_and_3_where_an_object_is_lost(broker, tierlog, offline):
    tierlog.ok("topic", "create", "v")
    tierlog.ok("produce", "v", stdin=b"one\ntwo\n")
    tierlog.ok("storage", "offload", "v")
    assert json.loads(tierlog.ok("storage", "verify", "v", "--deep"))["ok"] is True
    (log,) = broker.folder.glob("**/topics/v/*/0/segments/*.log")
    url = f"file://{str(log).partition('/topics/')[0]}"
    alone = offline.run("storage", "verify", "v", "--store", url, "--deep", "--output", "text")
    assert (alone.returncode, alone.stdout) == (0, b"")
    assert b"ok; checked 1 partition," in alone.stderr
    kept = log.read_bytes()
    log.unlink()
    for run in (
        tierlog.run("storage", "verify", "v"),
        offline.run("storage", "verify", "v", "--store", url),
    ):
        assert run.returncode == 3
        (problem,) = json.loads(run.stdout)["problems"]
        assert (problem["kind"], problem["object_key"]) == ("object-missing", str(log))
    log.write_bytes(kept)


def test_all_topics_are_verified_and_listed_also_beside_one_that_is_lost(
    broker, tierlog, offline, tmp_path
):
    for name in ("all-1", "all-2"):
        tierlog.ok("topic", "create", name, "--config", "segment.bytes=1048576")
        tierlog.ok("produce", name, stdin=b"one\ntwo\n")
        tierlog.ok("storage", "offload", name)
    told = json.loads(tierlog.ok("storage", "verify"))
    assert told["ok"] is told["topics"]["all-1"]["ok"] is told["topics"]["all-2"]["ok"] is True
    assert b"all-2: ok; checked" in tierlog.run("storage", "verify", "--output", "text").stderr

    (cluster,) = broker.folder.glob("**/cluster.json")
    bucket = shutil.copytree(cluster.parent, tmp_path / "bucket")
    store = ("--store", f"file://{bucket}")
    asked = ("topic", "list", "--prefix", "all-")
    assert offline.ok(*asked, *store) == tierlog.ok(*asked)
    assert json.loads(offline.ok("storage", "verify", *store))["ok"] is True
    (topic,) = bucket.glob("topics/all-1/*/topic")
    shutil.rmtree(topic)
    run = offline.run(*asked, *store)
    assert (run.returncode, b"the topic object, which" in run.stderr) == (3, True)
    assert [one["name"] for one in json.loads(run.stdout)["topics"]] == ["all-2"]
    run = offline.run("storage", "verify", *store)
    told = json.loads(run.stdout)["topics"]
    assert (run.returncode, told["all-1"]["ok"], told["all-2"]["ok"]) == (3, False, True)
    assert "the topic object, which" in told["all-1"]["error"]
    said = offline.fails(1, "storage", "segments", "all-1", *store)
    assert "the topic object, which" in said


def test_where_no_cluster_is_none_is_listed_or_verified(offline, tmp_path):
    store = ("--store", f"file://{tmp_path}")
    for command in (("topic", "list"), ("storage", "verify")):
        assert "holds no cluster" in offline.fails(1, *command, *store)


def test_verify_of_an_unknown_topic_is_one_line(offline, tmp_path):
    said = offline.fails(1, "storage", "verify", "nobody", "--store", f"file://{tmp_path}")
    assert "nobody" in said


def test_a_terminal_sees_that_a_broker_verifies(broker, tierlog):
    tierlog.ok("topic", "create", "watched")
    seen, terminal = os.openpty()
    try:
        process = Forked(
            ["storage", "verify", "watched", "--deep"],
            stdout=terminal,
            stderr=terminal,
            env=tierlog.environment | {"TERM": "xterm"},
        )
        assert process.wait(60) == 0
        assert b"verify watched, by the broker" in os.read(seen, 4096)
    finally:
        os.close(terminal)
        os.close(seen)


@pytest.mark.parametrize(("left_out", "said"), [(0, "v: 1 problem;"), (7, "v: 8 problems;")])
def test_problems_that_no_table_holds_are_counted_too(left_out, said, capsys):
    lost = {"kind": "object-missing", "partition": 0, "object_key": "x", "detail": "gone"}
    report = {"ok": False, "problems": [lost], "problems_left_out": left_out, "checked": {}}
    print_report("v", report)
    assert said in capsys.readouterr().err
