"""The dump prints exactly what Kafka's DumpLogSegments prints of the same files."""

import re

import pytest

from tests.unit.record_format import golden
from tierlog.cli.dump_formats import to_text
from tierlog.cli.dump_reader import read_items


def test_dump_prints_what_kafka_prints():
    dumps = golden.files("*.dump.txt")
    assert len(dumps) > 300
    for dump in dumps:
        file = golden.dumped_by(dump)
        with_data = file.suffix == ".log" and file.stat().st_size <= 6000
        shown = "".join(to_text(item, with_data=with_data) + "\n" for item in read_items(file))
        assert comparable(shown) == comparable(dump.read_bytes().decode()), file


def comparable(text: str) -> str:
    """Without known differences: Java decodes invalid UTF-8 to another number of replacement
    characters, and Kafka's tool reports a false gap at the start of a log. The fixtures lost
    trailing blanks.
    """
    text = re.sub("\N{REPLACEMENT CHARACTER}+", "\N{REPLACEMENT CHARACTER}", text)
    text = text.replace(" \n", "\n").rstrip()
    text = text.partition("\nFound timestamp mismatch")[0]  # false, of a batch without records
    text = re.sub(r"\n  -1 is followed by \d+", "", text)
    return re.sub(r"\nNon-consecutive offsets in \S+\Z", "", text)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        (
            "leader-epoch-checkpoint",
            b"0\n2\n0 0\n3 17\n",
            ["epoch: 0 startOffset: 0", "epoch: 3 startOffset: 17"],
        ),
        (
            "recovery-point-offset-checkpoint",
            b"0\n2\na-b 0 5\nc 12 0\n",
            ["topic: a-b partition: 0 offset: 5", "topic: c partition: 12 offset: 0"],
        ),
        (
            "partition.metadata",
            b"version: 0\ntopic_id: MjD0UKSJT2qa6zQLS6M5HA",
            ["version: 0 topicId: MjD0UKSJT2qa6zQLS6M5HA"],
        ),
        (
            "meta.properties",
            b"#\n#Thu Jan 01 00:00:00 UTC 1970\ncluster.id=abc\nversion=1\n",
            ["cluster.id: abc", "version: 1"],
        ),
        (
            "log-start-offset-checkpoint",
            b"0\n3\na 0 5\n",
            ["Found the count does not match 1 lines in log-start-offset-checkpoint"],
        ),
    ],
)
def test_files_unknown_to_kafkas_tool_are_printed_in_its_style(tmp_path, name, content, lines):
    (tmp_path / name).write_bytes(content)
    shown = [to_text(item) for item in read_items(tmp_path / name)]
    assert shown == [f"Dumping {name}", *lines]
