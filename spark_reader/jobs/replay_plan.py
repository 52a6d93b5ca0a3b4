"""Which rows each step of a replay reads: pure, and kept as JSON beside what is written.

    {"format_version": 1, "asked": {...}, "topic_ids": {"flights": "<topic id>"},
     "steps": [{"flights": {"0": [0, 5000], "1": [0, 4700]}}]}

Rules that keep it honest:

* The plan is made once. Continuing a replay reads the same offsets as the first run, whatever was
  appended since, and of the same topics: the ids distinguish them from others of their names (older
  plans have none).
* A step is about `step_bytes` of the log, its ranges follow those of the step before, and the steps
  together are what was asked for.
* `asked` is compared when a replay goes on: a folder belongs to one question. No secret is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from record_format.errors import CorruptDataError
from spark_reader.plan import Split
from spark_reader.ranges import OffsetRange

FORMAT_VERSION: Final = 1

_RANGE: Final = ("subscribe", "subscribepattern", "assign", "starting", "ending")

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
            detail = f"is a replay plan of format {document['format_version']!r}"
            raise CorruptDataError(f"{detail}, and this tierlog knows {FORMAT_VERSION}", file=file)
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


def cut_steps(
    ranges: Iterable[OffsetRange], splits: Sequence[Split], *, split_bytes: int, step_bytes: int
) -> list[Step]:
    """Steps of about `step_bytes`, each a like share of every partition."""
    by_place: dict[tuple[str, int], list[Split]] = {}
    for split in splits:
        by_place.setdefault((split.topic, split.partition), []).append(split)
    count = max(1, -(-len(splits) * split_bytes // step_bytes))
    steps: list[dict[str, dict[int, Range]]] = [{} for _ in range(count)]
    for one in ranges:
        place = (one.facts.topic, one.facts.partition)
        own = by_place.get(place, [])
        if not own:
            continue
        borders = [own[len(own) * number // count].start_offset for number in range(count)]
        borders = [one.start_offset, *borders[1:], one.end_offset]
        for number, step in enumerate(steps):
            start, end = borders[number], borders[number + 1]
            if start < end:
                step.setdefault(place[0], {})[place[1]] = (start, end)
    return [step for step in steps if step]


def options_of(step: Step, source: Mapping[str, str]) -> dict[str, str]:
    """A step as the source's options say it: `source`, except for what chose topics and offsets."""
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
    """A source refuses what is said of a partition that it does not read."""
    read = {
        topic: {number: one for number, one in of.items() if int(number) in step.get(topic, ())}
        for topic, of in versions.items()
    }
    return {topic: of for topic, of in read.items() if of}
