"""Repair, garbage, pins and restore as an operator types them; brokers in their own processes."""

import json
import shutil

import pytest

from tests.fakes.command_line import Program, RunningBroker


class Served:
    """A broker on a folder of `root`, until the block ends."""

    def __init__(self, root, data_dir):
        folder = root / f"{data_dir}-run-{len(list(root.iterdir()))}"
        folder.mkdir()
        self._running = RunningBroker(
            "serve",
            *("--data-dir", root / data_dir, "--store", f"file://{root / 'bucket'}"),
            *("--listen", "127.0.0.1:0"),
            cwd=folder,
        )

    def __enter__(self):
        return Program(self._running.server)

    def __exit__(self, *_):
        assert self._running.stop() == 0


@pytest.fixture
def place(tmp_path):
    """A stopped broker's folder and bucket, with a topic of two segments."""
    with Served(tmp_path, "data") as run:
        run.ok("topic", "create", "t")
        for text in (b"one\ntwo\n", b"three\n"):
            run.ok("produce", "t", stdin=text)
            run.ok("storage", "offload", "t")
    return tmp_path


def on(place, *, data_dir=None):
    flags = ["--store", f"file://{place / 'bucket'}", "--output", "json"]
    return [*flags, "--data-dir", place / data_dir] if data_dir else flags


def test_repair_says_what_it_would_do_and_then_does_it(place):
    offline = Program()
    (log, *_) = sorted((place / "bucket").glob("topics/t/*/0/segments/*.log"))
    log.unlink()
    planned = offline.run("storage", "repair", "t", *on(place, data_dir="data"))
    assert planned.returncode == 3
    (step,) = json.loads(planned.stdout)["steps"]
    assert (step["action"], step["object_key"]) == ("upload-again", str(log))
    done = offline.ok("storage", "repair", "t", "--apply", *on(place, data_dir="data"))
    assert json.loads(done)["steps"][0]["done"] is True
    assert json.loads(offline.ok("storage", "verify", "t", "--deep", *on(place)))["ok"]
    garbage = json.loads(offline.ok("storage", "gc", "t", *on(place, data_dir="data")))
    assert garbage == {"topic": "t", "applied": False, "garbage": []}


def test_repair_needs_a_folder_that_no_broker_has_open(place):
    offline = Program()
    with Served(place, "data"):
        refused = offline.run("storage", "repair", "t", *on(place, data_dir="data"))
    assert refused.returncode == 1
    assert b"in use by another broker" in refused.stderr
    refused = offline.run("storage", "gc", "t", *on(place, data_dir="nothing"))
    assert b"is no broker's data folder" in refused.stderr
    assert not (place / "nothing").exists()


def test_pins_are_made_listed_and_let_go(place):
    offline = Program()
    (made,) = json.loads(offline.ok("storage", "pin", "t", "friday", *on(place)))["pins"]
    assert (made["name"], made["partition"], made["expires_ms"]) == ("friday", 0, None)
    again = offline.run("storage", "pin", "t", "friday", *on(place))
    assert b"exists already" in again.stderr
    assert json.loads(offline.ok("storage", "pins", "t", *on(place)))["pins"] == [made]
    offline.ok("storage", "unpin", "t", "friday", "--store", f"file://{place / 'bucket'}")
    assert json.loads(offline.ok("storage", "pins", "t", *on(place)))["pins"] == []


def test_a_lost_folder_is_restored_and_served(place):
    offline = Program()
    shutil.rmtree(place / "data")
    flags = ("--restore-offset-gap", "1000", *on(place, data_dir="new"))
    report = json.loads(offline.ok("storage", "restore", *flags))
    assert [(one["topic"], one["end_offset"]) for one in report["partitions"]] == [("t", 3)]
    again = offline.run("storage", "restore", *flags)
    assert b"is not empty" in again.stderr
    with Served(place, "new") as run:
        assert run.ok("consume", "t") == b"one\ntwo\nthree\n"
        assert json.loads(run.ok("produce", "t", stdin=b"four\n"))["records"] == 1
        shown = run.ok("consume", "t", "--format", "json").splitlines()
    read = [(one["offset"], one["value"]) for one in map(json.loads, shown)]
    assert read[-2:] == [(2, "three"), (1003, "four")]
