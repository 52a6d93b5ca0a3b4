"""`tierlog storage` repair, gc, pin and restore; brokers run in their own processes."""

import json
import os
import shutil
import signal

import pytest

from tests.fakes.command_line import Program, RunningBroker
from tests.fakes.damage import flip
from tests.fakes.forked import Forked

GAP = 10**9


class Served:
    """A broker on a data folder below `root`, while the block runs."""

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
        self.process.send_signal(signal.SIGCONT)  # a failed test may have left it stopped
        assert self._running.stop() == 0


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template")
    with Served(root, "data") as run:
        run.ok("topic", "create", "t")
        for text in (b"one\ntwo\n", b"three\n"):
            run.ok("produce", "t", stdin=text)
            run.ok("storage", "offload", "t")
    return root


@pytest.fixture
def root(template, tmp_path):
    """Fresh copies of a stopped broker's data folder and bucket, with a topic of two segments."""
    for folder in ("data", "bucket"):
        shutil.copytree(template / folder, tmp_path / folder)
    return tmp_path


def interrupt(root, fifo, *arguments):
    """Run a command, interrupt it while it reads `fifo`, and return its output."""
    with (root / "output").open("wb") as output:
        command = Forked(list(arguments), stdout=output, stderr=output, env=Program().environment)
        try:
            with fifo.open("wb"):  # returns when the command opens it
                command.send_signal(signal.SIGINT)
                assert command.wait(60) == 130
        finally:
            command.kill()
    return (root / "output").read_text()


def flags_for(root, *, data_dir=None):
    flags = ["--store", f"file://{root / 'bucket'}", "--output", "json"]
    return [*flags, "--data-dir", root / data_dir] if data_dir else flags


def test_repair_plans_first_and_acts_with_apply(root):
    offline = Program()
    (log, *_) = sorted((root / "bucket").glob("topics/t/*/0/segments/*.log"))
    log.unlink()
    planned = offline.run("storage", "repair", "t", *flags_for(root, data_dir="data"))
    assert planned.returncode == 3
    (step,) = json.loads(planned.stdout)["steps"]
    assert (step["action"], step["object_key"]) == ("upload-again", str(log))
    result = offline.ok("storage", "repair", "t", "--apply", *flags_for(root, data_dir="data"))
    assert json.loads(result)["steps"][0]["done"] is True
    assert json.loads(offline.ok("storage", "verify", "t", "--deep", *flags_for(root)))["ok"]


def test_repair_requires_a_closed_data_folder(root):
    offline = Program()
    with Served(root, "data"):
        refused = offline.run("storage", "repair", "t", *flags_for(root, data_dir="data"))
    assert refused.returncode == 1
    assert b"in use by another broker" in refused.stderr
    refused = offline.run("storage", "gc", "t", "--apply", *flags_for(root, data_dir="nothing"))
    assert b"not a broker's data folder" in refused.stderr
    assert not (root / "nothing").exists()


def test_gc_lists_beside_a_running_broker_and_deletes_only_as_owner(root):
    offline = Program()
    (segments,) = (root / "bucket").glob("topics/t/*/0/segments")
    orphan = segments / f"{0:020d}-9-{'0' * 20}.log"
    orphan.write_bytes(b"of an interrupted upload")
    command = ("storage", "gc", "t", *flags_for(root))
    with Served(root, "data"):
        listed = json.loads(
            offline.ok(*command, "--gc-grace-ms", "0", "--manifest-versions-min", "1")
        )
        assert json.loads(offline.ok(*command))["garbage"] == [], "within the grace period of a day"
        assert b"nothing to delete" in offline.run(*command).stderr
        refused = offline.fails(1, *command, "--apply", "--data-dir", root / "data")
    assert "in use by a broker, which collects garbage itself" in refused
    (found,) = [one for one in listed["garbage"] if one["kind"] == "orphan"]
    assert (listed["applied"], found["partition"]) == (False, 0)
    assert str(orphan).endswith(found["name"])
    assert orphan.exists()
    unowned = offline.run(*command, "--apply")
    assert unowned.returncode == 2
    assert b"--data-dir" in unowned.stderr
    applied = ("--apply", "--gc-grace-ms", "0", "--data-dir", root / "data")
    assert json.loads(offline.ok(*command, *applied))["applied"]
    assert not orphan.exists()
    assert json.loads(offline.ok("storage", "verify", "t", "--deep", *flags_for(root)))["ok"]


def test_a_missing_bucket_folder_is_an_error_and_not_created(tmp_path):
    offline, typo = Program(), tmp_path / "buckte"
    for command in (("verify", "t"), ("gc", "t"), ("manifest", "t"), ("restore",)):
        flags = ("--data-dir", tmp_path / "new") if command == ("restore",) else ()
        refused = offline.run("storage", *command, *flags, "--store", f"file://{typo}")
        assert refused.returncode == 1
        assert b"the folder does not exist" in refused.stderr
    assert not typo.exists()
    assert not (tmp_path / "new").exists()


def test_pins_are_created_listed_and_removed(root):
    offline = Program()
    (pin,) = json.loads(offline.ok("storage", "pin", "t", "friday", *flags_for(root)))["pins"]
    assert (pin["name"], pin["partition"], pin["expires_ms"]) == ("friday", 0, None)
    again = offline.run("storage", "pin", "t", "friday", *flags_for(root))
    assert b"already exists" in again.stderr
    assert json.loads(offline.ok("storage", "pins", "t", *flags_for(root)))["pins"] == [pin]
    store = ("--store", f"file://{root / 'bucket'}")
    unknown = offline.run("storage", "unpin", "t", "firday", *store, "--output", "text")
    assert (unknown.returncode, b"no pin 'firday'" in unknown.stderr) == (0, True)
    (file,) = (root / "bucket").rglob("friday.json")
    file.chmod(0o644)
    file.write_bytes(b"rotten")
    removed = json.loads(offline.ok("storage", "unpin", "t", "friday", *store))
    assert removed == {"topic": "t", "name": "friday", "removed": True}
    assert json.loads(offline.ok("storage", "pins", "t", *flags_for(root)))["pins"] == []


def test_an_interrupted_pin_explains_its_removal(root):
    versions = sorted((root / "bucket").rglob("manifest/*.json"))
    for path in versions:  # an empty version is void: the next older is read, and so on
        path.unlink()
        os.mkfifo(path)
    newest = versions[-1]
    store = ("--store", f"file://{root / 'bucket'}")
    error = interrupt(root, newest, "storage", "pin", "t", "friday", *store)
    assert "some partitions may be pinned as friday" in error
    assert "`tierlog storage unpin t friday` removes these pins" in error


def test_a_lost_data_folder_is_restored_and_served(root):
    offline = Program()
    shutil.rmtree(root / "data")
    flags = ("--restore-offset-gap", str(GAP + 1000), *flags_for(root, data_dir="new"))
    report = json.loads(offline.ok("storage", "restore", *flags))
    assert [(one["topic"], one["end_offset"]) for one in report["partitions"]] == [("t", 3)]
    again = offline.run("storage", "restore", *flags)
    assert b"is not empty" in again.stderr
    spaced = flags_for(root, data_dir="new disk")
    next_step = offline.run("storage", "restore", *spaced, "--output", "text").stderr.decode()
    assert f"tierlog serve --data-dir '{root}/new disk' --store " in next_step
    with Served(root, "new") as run:
        assert run.ok("consume", "t") == b"one\ntwo\nthree\n"
        assert json.loads(run.ok("produce", "t", stdin=b"four\n"))["records"] == 1
        shown = run.ok("consume", "t", "--format", "json").splitlines()
    read = [(one["offset"], one["value"]) for one in map(json.loads, shown)]
    assert read[-2:] == [(2, "three"), (GAP + 1003, "four")]
    bad = root / "bucket" / "topics" / "bad" / "some-id" / "topic" / f"{1:020d}.json"
    bad.parent.mkdir(parents=True)
    bad.write_text("rotten")
    result = offline.run("storage", "restore", *flags_for(root, data_dir="another"))
    assert result.returncode == 3
    assert b"restore into a new folder" in result.stderr
    (other,) = json.loads(result.stdout)["others"]
    text = offline.run("storage", "restore", *flags_for(root, data_dir="third"), "--output", "text")
    assert b"continues from there" not in text.stderr, "only after a complete restore"
    assert (other["name"], "not a sealed" in other["unreadable"]) == ("bad", True), other


def test_an_interrupted_restore_must_be_completed_before_serving(root):
    epochs, saved = root / "data" / "tierlog" / "epochs.json", root / "epochs.json"
    epochs.rename(saved)
    os.mkfifo(epochs)
    flags = [*flags_for(root, data_dir="new"), "--tail", root / "data"]
    error = interrupt(root, epochs, "storage", "restore", *flags)
    assert "interrupted: run the same command again, it starts over on" in error
    offline = Program()
    refused = offline.fails(
        1,
        "serve",
        "--listen",
        "127.0.0.1:0",
        *flags_for(root, data_dir="new")[:2],
        "--data-dir",
        root / "new",
    )
    assert "a restore into it is incomplete: run `tierlog storage restore` on it again" in refused
    epochs.unlink()
    saved.rename(epochs)
    report = json.loads(offline.ok("storage", "restore", *flags))
    assert [one["tail"]["whole"] for one in report["partitions"]] == [True]


def test_a_restore_from_a_damaged_tail_names_it_and_exits_3(root):
    with Served(root, "data") as run:
        run.ok("produce", "t", stdin=b"four\n")
    (tail,) = (root / "data" / "t-0").glob(f"{3:020d}.log")
    flip(tail, tail.stat().st_size - 3)
    result = Program().run(
        "storage", "restore", *flags_for(root, data_dir="new"), "--tail", root / "data"
    )
    assert result.returncode == 3
    assert b"damaged: t-0: serve once, stop, `storage repair --deep` on" in result.stderr


def test_topics_and_group_offsets_move_through_the_bucket(root):
    reading = ("consume", "t", "--group", "g", "--max-records")
    with Served(root, "data") as run:
        run.ok("topic", "create", "u")
        run.ok("produce", "u", stdin=b"of u\n")
        assert run.ok(*reading, "2") == b"one\ntwo\n"
        offloaded = json.loads(run.ok("storage", "offload"))["topics"]
        assert {name: topic["uploaded_segments"] for name, topic in offloaded.items()} == {
            "__consumer_offsets": 1,
            "t": 0,
            "u": 1,
        }
    Program().ok("storage", "restore", *flags_for(root, data_dir="new"))
    with Served(root, "new") as run:
        assert run.ok(*reading, "1") == b"three\n"
        assert run.ok("consume", "u") == b"of u\n"


def test_a_paused_broker_is_fenced_after_a_takeover(root):
    offline, old = Program(), Served(root, "data", "--fence-check-ms", "100")
    with old as paused:
        paused.ok("produce", "t", stdin=b"diverged\n")
        old.process.send_signal(signal.SIGSTOP)
        offline.ok("storage", "restore", *flags_for(root, data_dir="new"))
        with Served(root, "new") as run:
            run.ok("produce", "t", stdin=b"four\n")
            old.process.send_signal(signal.SIGCONT)
            refused = paused.fails(1, "produce", "t", stdin=b"late\n")
            assert "leadership lost: t-0" in refused
            assert "leadership lost: t-0" in paused.fails(1, "topic", "delete", "t", "--yes")
            run.ok("storage", "offload", "t")
            assert json.loads(run.ok("storage", "verify", "t", "--deep"))["ok"]
    take_over = ("t", "--apply", "--take-over", "--restore-offset-gap")
    offline.ok("storage", "repair", *take_over, str(2 * GAP), *flags_for(root, data_dir="data"))
    assert gaps(offline, root) == [[3, 3 + GAP], [4 + GAP, 4 + 3 * GAP]]
    offline.ok("storage", "gc", *take_over, str(3 * GAP), *flags_for(root, data_dir="new"))
    assert gaps(offline, root) == [[3, 3 + GAP], [4 + GAP, 4 + 6 * GAP]]
    with Served(root, "data", "--take-over") as run:
        assert run.ok("consume", "t") == b"one\ntwo\nthree\nfour\n"
        (tail,) = (root / "data" / "tierlog" / "diverged").glob("t-0-*/*.log")
        run.ok("topic", "create", "set-apart")
        run.ok("produce", "set-apart", tail, "--format", "batches", "--partition", "0")
        assert run.ok("consume", "set-apart").startswith(b"diverged\n")


def gaps(offline, root):
    shown = json.loads(offline.ok("storage", "manifest", "t", *flags_for(root)))
    return list(shown["gaps"])
