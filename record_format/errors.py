"""The error tree: a class says what the caller does next.

* Everything tierlog raises on purpose is a `TierlogError`; anything else is a bug.
* A class carries the facts (offsets, limits, file and position) as attributes; the message says
  them in words. HTTP statuses are not known here: one table in `api` maps classes to them.
* Foreign exceptions (OSError, botocore) are mapped once, at the adapter, with `from`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Self

# The process, or the system, has none left for now: nothing is wrong with the file.
FILE_LIMIT_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class TierlogError(Exception):
    """Base of every error that tierlog raises on purpose."""


class ConfigurationError(TierlogError):
    """The process cannot start as told: settings, data folder, or store must be mended."""


class SettingsError(ConfigurationError):
    """A setting cannot have the value it was given: mend the flag, the variable or the file."""


class ClockSkewTooLarge(ConfigurationError):
    """The store's clock and this machine's are too far apart: set it right."""


# --- mend the request -----------------------------------------------------------------------------


class RequestError(TierlogError):
    """The request is wrong; nothing was changed. Repeating it as it is cannot succeed."""


class FieldProblem(NamedTuple):
    """One thing wrong in a request: `loc` names the place, as in `records[3].key_base64`."""

    loc: str
    msg: str


class InvalidRequest(RequestError):
    """A malformed body, an unknown member or query parameter, a bad value."""

    def __init__(self, detail: str, *, problems: tuple[FieldProblem, ...] = ()) -> None:
        super().__init__(detail)
        self.problems = problems


class InvalidRecord(InvalidRequest):
    """A record that may not be appended: control batch, timestamp out of bounds, empty request."""


class InvalidConfig(InvalidRequest):
    """A topic configuration with an unknown key or a value that is out of range."""


class InvalidTopicName(InvalidRequest):
    """Kafka's rule: `[a-zA-Z0-9._-]`, 1 to 249 characters, not `.` or `..`."""


class InvalidBatch(RequestError):
    """A produced batch is not a whole, valid v2 batch. `position`: its first byte in the body."""

    def __init__(self, detail: str, *, position: int) -> None:
        super().__init__(detail)
        self.position = position


class UnknownTopicOrPartition(RequestError):
    pass


class UnknownTopic(UnknownTopicOrPartition):
    """`place`: where it was looked for, if that is not the broker that answers. `detail`: what is
    to be said in place of that.
    """

    def __init__(self, topic: str, *, place: str = "", detail: str = "") -> None:
        where = f" in {place}" if place else ""
        super().__init__(detail or f"there is no topic {topic!r}{where}")
        self.topic = topic

    @classmethod
    def recreated(cls, topic: str) -> UnknownTopic:
        """The one that was meant is gone; the name is another's now."""
        return cls(topic, detail=f"topic {topic!r} was deleted and made anew: it is another one")


class UnknownPartition(UnknownTopicOrPartition):
    """`place`: what in the request names it, if that is not its path."""

    def __init__(self, topic: str, partition: int, *, place: str = "") -> None:
        where = f"{place}: " if place else ""
        super().__init__(f"{where}topic {topic!r} has no partition {partition}")
        self.topic, self.partition = topic, partition


class UnknownSegment(RequestError):
    pass


class UnknownGroup(RequestError):
    pass


class UnknownManifestVersion(RequestError):
    pass


class TopicExists(RequestError):
    pass


class InvalidPartitionCount(RequestError):
    pass


class Forbidden(RequestError):
    """Producing to an internal topic, or a token without the scope."""


class OffsetOutOfRange(RequestError):
    """The offset is outside [log_start_offset, high_watermark]."""

    def __init__(self, detail: str, *, log_start_offset: int, high_watermark: int) -> None:
        super().__init__(detail)
        self.log_start_offset, self.high_watermark = log_start_offset, high_watermark


class OffsetTrimmed(OffsetOutOfRange):
    """Below the log start: retention or a trim removed it."""


class OffsetPastEnd(OffsetOutOfRange):
    """Above the high watermark."""


class OffsetMismatch(RequestError):
    """A conditional append found another log end."""

    def __init__(self, *, expected_offset: int, log_end_offset: int) -> None:
        super().__init__(f"the log ends at {log_end_offset}, not at {expected_offset}")
        self.expected_offset, self.log_end_offset = expected_offset, log_end_offset


class TooLarge(RequestError):
    def __init__(self, detail: str, *, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(detail)
        self.limit_bytes, self.size_bytes = limit_bytes, size_bytes


class RecordTooLarge(TooLarge):
    """A record or batch above `max.message.bytes`. `row`: which of the records it is, if one is."""

    def __init__(
        self, detail: str, *, limit_bytes: int, size_bytes: int, row: int | None = None
    ) -> None:
        super().__init__(detail, limit_bytes=limit_bytes, size_bytes=size_bytes)
        self.row = row


class RequestTooLarge(TooLarge):
    """A body above the limits of the front door."""


class TooManyRecords(RequestError):
    """More records in a request than the front door takes."""

    def __init__(self, *, limit_records: int, records: int) -> None:
        super().__init__(
            f"the request holds {records} records or parts of them; at most {limit_records}"
        )
        self.limit_records, self.records = limit_records, records


class OutOfOrderSequence(RequestError):
    """An idempotent producer's sequence leaves a gap (Kafka's OUT_OF_ORDER_SEQUENCE_NUMBER)."""


class ProducerFenced(RequestError):
    """An idempotent producer's epoch is older than one seen (Kafka's INVALID_PRODUCER_EPOCH)."""


# --- try again ------------------------------------------------------------------------------------


class RetriableError(TierlogError):
    """Nothing was changed; the same call may succeed after `retry_after_s` seconds."""

    def __init__(self, detail: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class StoreUnavailable(RetriableError):
    """The object store does not answer, throttles, or answers 5xx."""


class StoreUnreachable(StoreUnavailable):
    """Nobody was there to be asked: no request was made."""


class ManifestConflict(RetriableError):
    """Another commit won the version: reload, check the epoch, apply again."""


class Throttled(RetriableError):
    pass


class Starting(RetriableError):
    pass


class ShuttingDown(RetriableError):
    pass


class DiskFull(RetriableError):
    """ENOSPC, or the reserve is reached: writes are refused until space is back, reads go on."""


class TooManyOpenFiles(DiskFull):
    """EMFILE: refused like a full disk, but freeing disk space does not help."""


def disk_full_error(where: object, error: OSError, *, retry_after_s: float = 1.0) -> DiskFull:
    """What to raise for a call that the disk had no room for, or the process no descriptor."""
    kind = TooManyOpenFiles if error.errno in FILE_LIMIT_ERRNOS else DiskFull
    return kind(f"{where}: {error.strerror}", retry_after_s=retry_after_s)


class ObjectExists(TierlogError):
    """A create-if-absent lost (412): another writer's bytes are there, or our own earlier ones."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: the object exists already")
        self.key = key


# --- verify, never guess --------------------------------------------------------------------------


class OutcomeUnknownError(TierlogError):
    """A write may have landed. Read back before anything else."""


class FencedError(TierlogError):
    """A newer epoch exists: stop writing (`leadership-lost`)."""


# --- bytes that are not what they should be -------------------------------------------------------


class CorruptDataError(TierlogError):
    """Bytes from disk or bucket that fail their checks. `file` is a path or an object key."""

    def __init__(
        self, detail: str, *, file: str = "", position: int | None = None, offset: int | None = None
    ) -> None:
        where = f"{file}: " if file else ""
        where += f"position {position}: " if position is not None else ""
        where += f"offset {offset}: " if offset is not None else ""
        super().__init__(where + detail)
        self.detail, self.file, self.position, self.offset = detail, file, position, offset

    def with_location(
        self, *, file: str = "", position: int | None = None, offset: int | None = None
    ) -> Self:
        """The same error, with what its raiser could not know about the place; what is not given
        stays.
        """
        return type(self)(
            self.detail,
            file=file or self.file,
            position=self.position if position is None else position,
            offset=self.offset if offset is None else offset,
        )


@contextmanager
def eio_as(
    corrupt: type[CorruptDataError], *, file: str, position: int | None = None
) -> Iterator[None]:
    """What the disk cannot read (EIO) is reported like what fails its check; other OSErrors
    pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        detail = f"cannot be read: {error.strerror}"
        raise corrupt(detail, file=file, position=position) from error


class CorruptBatch(CorruptDataError):
    pass


class CorruptIndex(CorruptDataError):
    pass


class CorruptSnapshot(CorruptDataError):
    """A producer snapshot, checkpoint or epoch file."""


class CorruptManifest(CorruptDataError):
    pass


class UnknownFormatVersion(CorruptDataError):
    """Written by a newer tierlog: refused by name rather than misread."""


class CorruptObject(CorruptDataError):
    """An object whose bytes fail the checksum that the manifest or chunk table holds."""


class MissingObject(CorruptDataError):
    """The manifest names an object that the bucket does not have."""


class LogOfflineError(TierlogError):
    """The local disk failed under this log; it is closed until the broker restarts."""
