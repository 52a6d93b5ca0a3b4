"""One step of a repair plan, planned or carried out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from tierlog.hot_tier.salvage import LostRange

ACCEPT_LOSS: Final = "; requires --accept-loss"  # suffix of a step that loses records, until done


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
    """`done` is set once the step was carried out."""

    action: Action
    partition: int
    detail: str
    object_key: str | None = None
    base_offset: int | None = None
    last_offset: int | None = None
    done: bool = False

    def mark_done(self) -> RepairStep:
        detail = self.detail.removesuffix(ACCEPT_LOSS)
        return msgspec.structs.replace(self, done=True, detail=detail)


def spans_of(lost: Iterable[LostRange]) -> str:
    """The offset ranges, as text."""
    spans = (f"{one.start_offset} to {one.end_offset - 1}" for one in lost if one.spans_offsets)
    return ", ".join(spans) or "none"
