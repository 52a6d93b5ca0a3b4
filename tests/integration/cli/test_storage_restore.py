"""Repair, garbage, pins and restore as an operator types them; brokers in their own processes."""

import json
import os
import shutil
import signal
import time

import pytest

from tests.fakes.command_line import Program, RunningBroker
from tests.fakes.damage import flip
from tests.fakes.forked import Forked


class Served:
    """A broker on a folder of `root`, until the block ends."""

    def __init__(self, root, data_dir, *flags):
        folder = root / f"{data_dir}-run-{len(list(root.iterdir()))}"
        folder.mkdir()
        self._running = RunningBroker(
            "serve",
            *("--data-dir", root / data_dir, "--store", f"file://{root / 'bucket'}"),
            *("--listen", "127.0.0.1:0"),
            *flags,
            cwd=folder,
        )
        self.process = self._running.process

    def __enter__(self):
        return Program(self._running.server)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)  # in case a test failed before it did
        assert self._running.stop() == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    with Served(root, "data") as run:
        run.ok("topic", "create", "t")
        for text in (b"one\ntwo\n", b"three\n"):
            run.ok("produce", "t", stdin=text)
            run.ok("storage", "offload", "t")
    return root


@pytest.fixture
def place(made, tmp_path):
    """A stopped broker's folder and bucket, with a topic of two segments: copies of their own."""
    for folder in ("data", "bucket"):
        shutil.copytree(made / folder, tmp_path / folder)
    return tmp_path


def interrupted(place, fifo, *arguments):
    """What a command says that is interrupted where it reads a file."""
    with (place / "said").open("wb") as said:
        command = Forked(list(arguments), stdout=said, stderr=said, env=Program().environment)
        try:
            with fifo.open("wb"):  # once it is read
                command.send_signal(signal.SIGINT)
                assert command.wait(60) == 130
        finally:
            command.kill()
    return (place / "said").read_text()


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


def test_repair_needs_a_folder_that_no_broker_has_open(place):
    offline = Program()
    with Served(place, "data"):
        refused = offline.run("storage", "repair", "t", *on(place, data_dir="data"))
    assert refused.returncode == 1
    assert b"in use by another broker" in refused.stderr
    refused = offline.run("storage", "gc", "t", "--apply", *on(place, data_dir="nothing"))
    assert b"not a broker's data folder" in refused.stderr
    assert not (place / "nothing").exists()


def test_garbage_is_told_beside_a_running_broker_and_collected_by_the_owner_alone(place):
    offline = Program()
    (segments,) = (place / "bucket").glob("topics/t/*/0/segments")
    orphan = segments / f"{0:020d}-9-{'0' * 20}.log"
    orphan.write_bytes(b"of an upload that died")
    command = ("storage", "gc", "t", *on(place))
    with Served(place, "data"):
        told = json.loads(
            offline.ok(*command, "--gc-grace-ms", "0", "--manifest-versions-min", "1")
        )
        assert json.loads(offline.ok(*command))["garbage"] == [], "the grace is a day"
        assert b"nothing to delete" in offline.run(*command).stderr
        refused = offline.fails(1, *command, "--apply", "--data-dir", place / "data")
    assert "in use by a broker, which collects garbage itself" in refused
    (found,) = [one for one in told["garbage"] if one["kind"] == "orphan"]
    assert (told["applied"], found["partition"]) == (False, 0)
    assert str(orphan).endswith(found["name"])
    assert orphan.exists()
    nobody = offline.run(*command, "--apply")
    assert nobody.returncode == 2
    assert b"--data-dir" in nobody.stderr
    applied = ("--apply", "--gc-grace-ms", "0", "--data-dir", place / "data")
    assert json.loads(offline.ok(*command, *applied))["applied"]
    assert not orphan.exists()
    assert json.loads(offline.ok("storage", "verify", "t", "--deep", *on(place)))["ok"]


def test_a_bucket_that_is_not_there_is_said_and_not_made(tmp_path):
    offline, typo = Program(), tmp_path / "buckte"
    for command in (("verify", "t"), ("gc", "t"), ("manifest", "t"), ("restore",)):
        flags = ("--data-dir", tmp_path / "new") if command == ("restore",) else ()
        refused = offline.run("storage", *command, *flags, "--store", f"file://{typo}")
        assert refused.returncode == 1
        assert b"the folder does not exist" in refused.stderr
    assert not typo.exists()
    assert not (tmp_path / "new").exists()


def test_pins_are_made_listed_and_let_go(place):
    offline = Program()
    (made,) = json.loads(offline.ok("storage", "pin", "t", "friday", *on(place)))["pins"]
    assert (made["name"], made["partition"], made["expires_ms"]) == ("friday", 0, None)
    again = offline.run("storage", "pin", "t", "friday", *on(place))
    assert b"already exists" in again.stderr
    assert json.loads(offline.ok("storage", "pins", "t", *on(place)))["pins"] == [made]
    store = ("--store", f"file://{place / 'bucket'}")
    mistyped = offline.run("storage", "unpin", "t", "firday", *store)
    assert (mistyped.returncode, b"no pin 'firday'" in mistyped.stderr) == (0, True)
    (pin,) = (place / "bucket").rglob("friday.json")
    pin.chmod(0o644)
    pin.write_bytes(b"rotten")
    let_go = offline.run("storage", "unpin", "t", "friday", *store)
    assert (let_go.returncode, b"pin 'friday' removed" in let_go.stderr) == (0, True)
    assert json.loads(offline.ok("storage", "pins", "t", *on(place)))["pins"] == []


def test_an_interrupted_pin_says_how_to_remove_what_is_pinned_already(place):
    versions = sorted((place / "bucket").rglob("manifest/*.json"))
    for path in versions:  # an empty one is void: the next older is opened, and there it waits
        path.unlink()
        os.mkfifo(path)
    newest = versions[-1]
    store = ("--store", f"file://{place / 'bucket'}")
    said = interrupted(place, newest, "storage", "pin", "t", "friday", *store)
    assert "some partitions may be pinned as friday" in said
    assert "`tierlog storage unpin t friday` removes these pins" in said


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
    bad = place / "bucket" / "topics" / "bad" / "some-id" / "topic" / f"{1:020d}.json"
    bad.parent.mkdir(parents=True)
    bad.write_text("rotten")
    done = offline.run("storage", "restore", *on(place, data_dir="another"))
    assert done.returncode == 3
    assert b"restore into a new folder" in done.stderr
    (left,) = json.loads(done.stdout)["others"]
    text = offline.run("storage", "restore", *on(place, data_dir="third"), "--output", "text")
    assert b"continues from there" not in text.stderr, "not before that"
    assert (left["name"], "not a sealed" in left["unreadable"]) == ("bad", True), left


def test_an_interrupted_restore_says_how_it_goes_on_and_is_no_brokers_folder_until_then(place):
    epochs, kept = place / "data" / "tierlog" / "epochs.json", place / "epochs.json"
    epochs.rename(kept)
    os.mkfifo(epochs)
    flags = [*on(place, data_dir="new"), "--tail", place / "data"]
    said = interrupted(place, epochs, "storage", "restore", *flags)
    assert "interrupted: run the same command again, it starts over on" in said
    offline = Program()
    refused = offline.fails(
        1,
        "serve",
        "--listen",
        "127.0.0.1:0",
        *on(place, data_dir="new")[:2],
        "--data-dir",
        place / "new",
    )
    assert "a restore into it is incomplete: run `tierlog storage restore` on it again" in refused
    epochs.unlink()
    kept.rename(epochs)
    report = json.loads(offline.ok("storage", "restore", *flags))
    assert [one["tail"]["whole"] for one in report["partitions"]] == [True]


def test_a_restore_names_what_is_bad_in_the_old_folder_and_ends_as_a_check_that_found_it(place):
    with Served(place, "data") as run:
        run.ok("produce", "t", stdin=b"four\n")
    (tail,) = (place / "data" / "t-0").glob(f"{3:020d}.log")
    flip(tail, tail.stat().st_size - 3)
    done = Program().run("storage", "restore", *on(place, data_dir="new"), "--tail", place / "data")
    assert done.returncode == 3
    assert b"damaged: t-0: serve once, stop, `storage repair --deep` on" in done.stderr


def test_a_broker_moves_by_way_of_its_bucket_with_all_topics_and_groups(place):
    reading = ("consume", "t", "--group", "g", "--max-records")
    with Served(place, "data") as run:
        run.ok("topic", "create", "u")
        run.ok("produce", "u", stdin=b"of u\n")
        assert run.ok(*reading, "2") == b"one\ntwo\n"
        moved = json.loads(run.ok("storage", "offload"))["topics"]
        assert {name: one["uploaded_segments"] for name, one in moved.items()} == {
            "__consumer_offsets": 1,
            "t": 0,
            "u": 1,
        }
    Program().ok("storage", "restore", *on(place, data_dir="new"))
    with Served(place, "new") as run:
        assert run.ok(*reading, "1") == b"three\n"
        assert run.ok("consume", "u") == b"of u\n"


def test_a_broker_that_stood_still_while_another_took_over_damages_nothing(place):
    offline, old = Program(), Served(place, "data", "--fence-check-ms", "100")
    with old as zombie:
        zombie.ok("produce", "t", stdin=b"of its own\n")
        old.process.send_signal(signal.SIGSTOP)
        offline.ok("storage", "restore", "--restore-offset-gap", "100", *on(place, data_dir="new"))
        with Served(place, "new") as run:
            run.ok("produce", "t", stdin=b"four\n")
            old.process.send_signal(signal.SIGCONT)
            assert "leadership lost: t-0" in refusal_of(zombie, "produce", "t", stdin=b"late\n")
            assert "leadership lost: t-0" in zombie.fails(1, "topic", "delete", "t", "--yes")
            run.ok("storage", "offload", "t")
            assert json.loads(run.ok("storage", "verify", "t", "--deep"))["ok"]
    taking = ("t", "--apply", "--take-over", "--restore-offset-gap")
    offline.ok("storage", "repair", *taking, "70", *on(place, data_dir="data"))
    assert gaps(offline, place) == [[3, 103], [104, 174]]
    offline.ok("storage", "gc", *taking, "30", *on(place, data_dir="new"))
    assert gaps(offline, place) == [[3, 103], [104, 204]]
    with Served(place, "data", "--take-over") as run:
        assert run.ok("consume", "t") == b"one\ntwo\nthree\nfour\n"
        (tail,) = (place / "data").glob("t-0.diverged-*/*.log")
        run.ok("topic", "create", "set-apart")
        run.ok("produce", "set-apart", tail, "--format", "batches", "--partition", "0")
        assert run.ok("consume", "set-apart").startswith(b"of its own\n")


def gaps(offline, place):
    shown = json.loads(offline.ok("storage", "manifest", "t", *on(place)))
    return list(shown["gaps"])


def refusal_of(program, *arguments, stdin):
    """What it says once it is refused: a former owner takes what it is sent until it has looked."""
    deadline = time.monotonic() + 20
    while (done := program.run(*arguments, stdin=stdin)).returncode == 0:
        assert time.monotonic() < deadline
    return done.stderr.decode()
