"""The result of a verification, as values: nothing here raises, does I/O, or decides what to do.

A problem has a location (an object's full key, or a local file) and a description in words.
Findings of several threads are merged in the order in which the work was assigned, so that the same
damage gives the same report.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_PROBLEMS = 10_000  # in a report; the rest is only counted


class ProblemKind(StrEnum):
    """The machine-readable kind of a problem; `detail` is for people."""

    MANIFEST_MISSING = "manifest-missing"
    MANIFEST_CORRUPT = "manifest-corrupt"
    TOPIC_OBJECT = "topic-object"
    PAGE_MISSING = "page-missing"
    PAGE_CORRUPT = "page-corrupt"
    GAP = "gap"
    OVERLAP = "overlap"
    OBJECT_MISSING = "object-missing"
    OBJECT_SIZE = "object-size"
    OBJECT_CHECKSUM = "object-checksum"
    INDEXES_CORRUPT = "indexes-corrupt"
    CHUNK_CORRUPT = "chunk-corrupt"
    BATCH_CORRUPT = "batch-corrupt"
    CHUNK_TABLE_WRONG = "chunk-table-wrong"
    PIN_BROKEN = "pin-broken"
    SEGMENT_CORRUPT = "segment-corrupt"
    TIERS_DIFFER = "tiers-differ"


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`object_key` is the full key in the bucket; `base_offset` is the segment's."""

    kind: ProblemKind
    partition: int
    detail: str
    object_key: str | None = None
    file: str | None = None
    base_offset: int | None = None


class Checked(msgspec.Struct, kw_only=True):
    """How much was checked, so that a report without problems says what it is based on."""

    partitions: int = 0
    pages: int = 0
    segments: int = 0
    objects: int = 0
    chunks: int = 0
    records: int = 0
    local_segments: int = 0
    read_bytes: int = 0


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """`problems_left_out`: how many problems exceed the limit of a report."""

    ok: bool
    checked: Checked
    problems: list[Problem]
    problems_left_out: int = 0


class Findings(msgspec.Struct):
    """Problems and counts of one unit of work. Not thread-safe: each thread has its own."""

    partition: int
    checked: Checked = msgspec.field(default_factory=Checked)
    problems: list[Problem] = []
    left_out: int = 0

    def add_problem(
        self,
        kind: ProblemKind,
        detail: object,
        *,
        object_key: str | None = None,
        file: str | None = None,
        base_offset: int | None = None,
    ) -> None:
        self._keep(
            Problem(
                kind=kind,
                partition=self.partition,
                detail=str(detail),
                object_key=object_key,
                file=file,
                base_offset=base_offset,
            )
        )

    def merge(self, other: Findings) -> None:
        for name in Checked.__struct_fields__:
            setattr(self.checked, name, getattr(self.checked, name) + getattr(other.checked, name))
        for problem in other.problems:
            self._keep(problem)
        self.left_out += other.left_out

    def report(self) -> VerifyReport:
        return VerifyReport(
            ok=not self.problems,
            checked=self.checked,
            problems=self.problems,
            problems_left_out=self.left_out,
        )

    def _keep(self, problem: Problem) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.left_out += 1
