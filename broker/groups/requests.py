"""Validates group requests: the name, and the offsets of one commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tierlog.record_format.errors import FieldProblem, InvalidRequest

MAX_NAME_LENGTH: Final = 255
MAX_METADATA_BYTES: Final = 4096  # Kafka's offset.metadata.max.bytes


class NewOffset(NamedTuple):
    """The next offset that the group will read. `topic_id`, if given, must be the topic's."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""
    topic_id: str | None = None


def check_group_name(name: str) -> None:
    """Any text of 1 to 255 characters. Raises InvalidRequest."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        detail = f"a group's name has 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}"
        raise InvalidRequest(detail, problems=(FieldProblem("group", detail),))


def check_offsets(offsets: Sequence[NewOffset]) -> None:
    """Check the offsets of one commit. Raises InvalidRequest, which names each invalid one."""
    problems = []
    seen: set[tuple[str, int]] = set()
    for index, one in enumerate(offsets):
        size = len(one.metadata.encode())
        if size > MAX_METADATA_BYTES:
            detail = f"metadata has at most {MAX_METADATA_BYTES} bytes, not {size}"
            problems.append(FieldProblem(f"offsets[{index}].metadata", detail))
        if one[:2] in seen:
            detail = f"{one.topic}-{one.partition} is given twice"
            problems.append(FieldProblem(f"offsets[{index}]", detail))
        seen.add(one[:2])
    if not offsets:
        problems.append(FieldProblem("offsets", "at least one offset is required"))
    if problems:
        detail = "; ".join(f"{loc}: {msg}" for loc, msg in problems[:5])
        raise InvalidRequest(detail, problems=tuple(problems[:100]))
