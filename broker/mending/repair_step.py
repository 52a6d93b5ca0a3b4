"""What a repair would do, or has done: one row of its plan."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Action(StrEnum):
    MAKE_INDEXES = "make-indexes"
    UPLOAD_AGAIN = "upload-again"
    DROP = "drop"
    WRITE_TOPIC = "write-topic"
    COLLECT = "collect"
    SET_ASIDE = "set-aside"
    CUT = "cut"
    DROP_BATCHES = "drop-batches"
    NONE = "none"


class RepairStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a plan. `done` once it was applied."""

    action: Action
    partition: int
    detail: str
    object_key: str | None = None
    base_offset: int | None = None
    last_offset: int | None = None
    done: bool = False
