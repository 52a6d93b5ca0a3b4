"""The steps of a replay, and the rows that each reads. Pure; stored as JSON beside the output.

    {"format_version": 1, "asked": {...}, "topic_ids": {"flights": "<topic id>"},
     "steps": [{"flights": {"0": [0, 5000], "1": [0, 4700]}}]}

* The plan is made once. A resumed replay reads the same offsets as the first run, whatever was
  appended since, of the same topics: ids distinguish them from re-created topics (older plans have
  none).
* A step is about `step_bytes` of the log. Its ranges continue those of the previous step, and the
  steps together are the requested range.
* `asked` is the request, without secrets. It is compared when a replay resumes: a folder belongs to
  one request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierlog.record_format.errors import CorruptDataError
from tierlog.spark_reader.splits import OffsetRange, Split

FORMAT_VERSION: Final = 1

_RANGE: Final = ("subscribe", "assign", "starting", "ending")  # what their names begin with

Range = tuple[int, int]
Step = Mapping[str, Mapping[int, Range]]
"""[start offset, end offset) by topic and partition."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    asked: Mapping[str, str]
    topic_ids: Mapping[str, str]
    steps: Sequence[Step]

    def to_json(self) -> str:
        steps = [
            {
                topic: {str(number): list(one) for number, one in partitions.items()}
                for topic, partitions in step.items()
            }
            for step in self.steps
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "asked": dict(self.asked),
            "topic_ids": dict(self.topic_ids),
            "steps": steps,
        }
        return json.dumps(document, indent=1)


def from_json(text: str, *, file: str) -> ReplayPlan:
    """Raises CorruptDataError."""
    try:
        document = json.loads(text)
        if document["format_version"] != FORMAT_VERSION:
            detail = f"replay plan has format version {document['format_version']!r}"
            raise CorruptDataError(f"{detail}; this tierlog supports {FORMAT_VERSION}", file=file)
        steps = [_step(one) for one in document["steps"]]
        ids = dict(document.get("topic_ids", {}))
        return ReplayPlan(asked=dict(document["asked"]), topic_ids=ids, steps=steps)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError("is not a replay plan", file=file) from error


def _step(document: Any) -> Step:
    return {
        str(topic): {
            int(number): (int(start), int(end)) for number, (start, end) in partitions.items()
        }
        for topic, partitions in document.items()
    }


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
