"""The steps of a replay, and its position: the rows that each reads, and what was read. Pure; the
position is stored as JSON beside the output, a new file for each step:

    {"format_version": 1, "asked": {...}, "topic_ids": {"flights": "<topic id>"},
     "next_offsets": {"flights": {"0": 5000}}, "steps": 4, "records": 9700,
     "files": ["date=2013-07-04/part-00000-….parquet"]}

* The next run begins at `next_offsets`, of the same topics: ids distinguish them from re-created
  ones. Partitions that are not there yet begin where the request says.
* `files` are those of the last step, published by the same write as the offsets after them: their
  rows are of the replay from then on, and no other attempt's.
* A step is about `step_bytes` of the log. Its ranges continue those of the previous step, and the
  steps together are the requested range.
* `asked` is the request, without secrets: a folder belongs to one request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tierlog.record_format.errors import CorruptDataError
from tierlog.spark_reader.splits import OffsetRange, Split

FORMAT_VERSION: Final = 1

_RANGE: Final = ("subscribe", "assign", "starting", "ending")  # what their names begin with

Range = tuple[int, int]
Step = Mapping[str, Mapping[int, Range]]
"""[start offset, end offset) by topic and partition."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a replay is after `steps` steps, of which the last wrote `files`."""

    asked: Mapping[str, str]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    next_offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    steps: int = 0
    records: int = 0
    files: Sequence[str] = ()

    def after_step(
        self, step: Step, topic_ids: Mapping[str, str], *, records: int, files: Sequence[str]
    ) -> Position:
        reached = {
            topic: {number: end for number, (_, end) in of.items()} for topic, of in step.items()
        }
        return Position(
            asked=self.asked,
            topic_ids={**self.topic_ids, **topic_ids},
            next_offsets={
                topic: {**self.next_offsets.get(topic, {}), **reached.get(topic, {})}
                for topic in {*self.next_offsets, *reached}
            },
            steps=self.steps + 1,
            records=self.records + records,
            files=files,
        )

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1)


def from_json(text: str, *, file: str) -> Position:
    """Raises CorruptDataError."""
    try:
        document = json.loads(text)
        version = document.pop("format_version")
        if version != FORMAT_VERSION:
            detail = f"a replay's position has format version {version!r}"
            raise CorruptDataError(f"{detail}; this tierlog supports {FORMAT_VERSION}", file=file)
        document["next_offsets"] = {
            topic: {int(number): int(offset) for number, offset in of.items()}
            for topic, of in document["next_offsets"].items()
        }
        return Position(**document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError("is not a replay's position", file=file) from error


def split_into_steps(
    ranges: Iterable[OffsetRange], splits: Sequence[Split], *, split_bytes: int, step_bytes: int
) -> list[Step]:
    """Steps of about `step_bytes`, each with an equal share of every partition."""
    by_partition: dict[tuple[str, int], list[Split]] = {}
    for split in splits:
        by_partition.setdefault((split.topic, split.partition), []).append(split)
    count = max(1, -(-len(splits) * split_bytes // step_bytes))
    steps: list[dict[str, dict[int, Range]]] = [{} for _ in range(count)]
    for one in ranges:
        topic, partition = one.facts.topic, one.facts.partition
        own = by_partition.get((topic, partition), [])
        if not own:
            continue
        borders = [own[len(own) * number // count].start_offset for number in range(count)]
        borders = [one.start_offset, *borders[1:], one.end_offset]
        for number, step in enumerate(steps):
            start, end = borders[number], borders[number + 1]
            if start < end:
                step.setdefault(topic, {})[partition] = (start, end)
    return [step for step in steps if step]


def step_options(step: Step, source: Mapping[str, str]) -> dict[str, str]:
    """The source's options for a step: `source`, with the step's topics and offsets."""
    kept = {name: text for name, text in source.items() if not name.lower().startswith(_RANGE)}
    for name in [name for name in kept if name.lower() == "manifestversion"]:
        versions = _of_step(json.loads(kept.pop(name)), step)
        if versions:
            kept[name] = json.dumps(versions)
    starts = {t: {str(p): one[0] for p, one in of.items()} for t, of in step.items()}
    ends = {t: {str(p): one[1] for p, one in of.items()} for t, of in step.items()}
    return kept | {
        "assign": json.dumps({topic: sorted(of) for topic, of in step.items()}),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
    }


def _of_step(versions: Mapping[str, Mapping[str, int]], step: Step) -> Mapping[str, Any]:
    """Only those of the step's partitions, since the source rejects options for others."""
    read = {
        topic: {number: one for number, one in of.items() if int(number) in step.get(topic, ())}
        for topic, of in versions.items()
    }
    return {topic: of for topic, of in read.items() if of}
