"""The error tree: an error's class tells the caller what to do next.

* Everything that tierlog raises on purpose is a `TierlogError`; anything else is a bug.
* The facts (offsets, limits, file and position) are attributes; the message states them in words.
  HTTP statuses do not appear here: a table in `api` maps classes to them.
* Foreign exceptions (OSError, botocore) are mapped once, at the adapter, with `from`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, Self

# The process or the system is out of file descriptors; nothing is wrong with the file itself.
FILE_LIMIT_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class TierlogError(Exception):
    """Base of every error that tierlog raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without calling `__init__` again: it does not take what it made `args` of."""
        return _unpickled, (type(self), self.args), vars(self)


def _unpickled(kind: type[TierlogError], args: tuple[object, ...]) -> TierlogError:
    return kind.__new__(kind, *args)


class ConfigurationError(TierlogError):
    """The process cannot start: settings, data folder or store have to be corrected."""


class SettingsError(ConfigurationError):
    """A setting has an invalid value: correct the flag, the environment variable or the file."""


class TooManyThreads(ConfigurationError):
    """The system refuses this process another thread."""


class ClockSkewTooLarge(ConfigurationError):
    """The clocks of the store and of this machine differ by too much: correct them."""


# --- correct the request --------------------------------------------------------------------------


class RequestError(TierlogError):
    """The request is invalid; nothing was changed. Repeating it unchanged cannot succeed."""


class FieldProblem(NamedTuple):
    """One problem in a request; `loc` is its location, such as `records[3].key_base64`."""

    loc: str
    msg: str


class InvalidRequest(RequestError):
    """A malformed body, an unknown member or query parameter, an invalid value."""

    def __init__(self, detail: str, *, problems: tuple[FieldProblem, ...] = ()) -> None:
        super().__init__(detail)
        self.problems = problems


class InvalidOption(InvalidRequest):
    """An option of the Spark source that is unknown, is invalid, or conflicts with another."""


class InvalidRecord(InvalidRequest):
    """A record that may not be appended: control batch, timestamp out of bounds, empty request.
    `records`: which records of the batch, by index; none if all are refused.
    """

    def __init__(
        self,
        detail: str,
        *,
        problems: tuple[FieldProblem, ...] = (),
        records: tuple[int, ...] = (),
    ) -> None:
        super().__init__(detail, problems=problems)
        self.records = records


class InvalidTimestamp(InvalidRecord):
    """A record's timestamp is out of the topic's bounds (Kafka's INVALID_TIMESTAMP)."""


class SchemaMismatch(InvalidRecord):
    """A record's value is not of a schema of its topic (`schema.validation`)."""


class InvalidConfig(InvalidRequest):
    """A topic configuration with an unknown key or an invalid value."""


class PinExists(InvalidRequest):
    """The partition has a pin of that name."""


class InvalidTopicName(InvalidRequest):
    """Kafka's rule: `[a-zA-Z0-9._-]`, 1 to 249 characters, not `.` or `..`."""


class InvalidBatch(RequestError):
    """Bytes that are not a complete, valid v2 batch. `position`: where it begins in the body."""

    def __init__(self, detail: str, *, position: int) -> None:
        super().__init__(detail)
        self.position = position


class DamagedBatch(InvalidBatch):
    """Its checksum is wrong: it was damaged on its way, and may be sent again."""


class SchemaError(RequestError):
    """Of the schema registry. `error_code`: Confluent's."""

    def __init__(self, detail: str, *, error_code: int) -> None:
        super().__init__(detail)
        self.error_code = error_code


class UnknownSchema(SchemaError):
    """No such subject, version or id; or it is deleted, or not deleted yet."""


class IncompatibleSchema(SchemaError):
    """Not compatible with an earlier version, as the subject's level requires."""


class InvalidSchema(SchemaError):
    """A schema, a version, a level or a subject that is not valid."""


class UnknownTopicOrPartition(RequestError):
    pass


class UnknownTopic(UnknownTopicOrPartition):
    """`place`: where the topic was looked up, if not at the broker. `detail`: another message."""

    def __init__(self, topic: str, *, place: str = "", detail: str = "") -> None:
        where = f" in {place}" if place else ""
        super().__init__(detail or f"there is no topic {topic!r}{where}")
        self.topic = topic

    @classmethod
    def recreated(cls, topic: str) -> UnknownTopic:
        """The name now belongs to a different topic, with another id."""
        return cls(topic, detail=f"topic {topic!r} was deleted and re-created: its id has changed")


class UnknownPartition(UnknownTopicOrPartition):
    """`place`: which part of the request names it, if not the path."""

    def __init__(self, topic: str, partition: int, *, place: str = "") -> None:
        where = f"{place}: " if place else ""
        super().__init__(f"{where}topic {topic!r} has no partition {partition}")
        self.topic, self.partition = topic, partition


class UnknownSegment(RequestError):
    pass


class NotInCluster(RequestError):
    """The call is about a cluster, and this broker is alone."""


class UnknownBroker(RequestError):
    """No broker of the cluster has this node id."""


class BrokerInUse(RequestError):
    """What is asked of a broker does not fit its state: it runs, or does not, or has partitions."""


class NoReassignment(RequestError):
    """There is no reassignment of the partition to end."""


class UnknownGroup(RequestError):
    pass


class GroupRefused(RequestError):
    """A group's coordinator refuses a call. `reason`: Kafka's name of the error."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnknownManifestVersion(RequestError):
    pass


class TopicExists(RequestError):
    pass


class InvalidPartitionCount(RequestError):
    pass


class InvalidReplicationFactor(InvalidRequest):
    """Below 1, or more than there are brokers that live."""


class InvalidReplicaAssignment(InvalidRequest):
    """Brokers that are to have a partition: none, one twice, one that is not there, or not as many
    as the other partitions have.
    """


class Forbidden(RequestError):
    """Producing to an internal topic, or a token without the scope."""


class OffsetOutOfRange(RequestError):
    """The offset is outside [log_start_offset, high_watermark]."""

    def __init__(self, detail: str, *, log_start_offset: int, high_watermark: int) -> None:
        super().__init__(detail)
        self.log_start_offset, self.high_watermark = log_start_offset, high_watermark


class OffsetTrimmed(OffsetOutOfRange):
    """Below the log start offset: retention or a trim removed it."""


class OffsetPastEnd(OffsetOutOfRange):
    """Above the high watermark."""


class OffsetMismatch(RequestError):
    """A conditional append expected another log end offset."""

    def __init__(self, *, expected_offset: int, log_end_offset: int) -> None:
        super().__init__(f"log end offset is {log_end_offset}, expected {expected_offset}")
        self.expected_offset, self.log_end_offset = expected_offset, log_end_offset


class TooLarge(RequestError):
    def __init__(self, detail: str, *, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(detail)
        self.limit_bytes, self.size_bytes = limit_bytes, size_bytes


class RecordTooLarge(TooLarge):
    """A record or batch above `max.message.bytes`. `row`: the record's index, if it is a record."""

    def __init__(
        self, detail: str, *, limit_bytes: int, size_bytes: int, row: int | None = None
    ) -> None:
        super().__init__(detail, limit_bytes=limit_bytes, size_bytes=size_bytes)
        self.row = row


class RequestTooLarge(TooLarge):
    """A request body above the server's limits."""


class TooManyRecords(RequestError):
    """More records in a request than the server's limit."""

    def __init__(self, *, limit_records: int, records: int) -> None:
        super().__init__(
            f"the request has {records} records or record parts; the limit is {limit_records}"
        )
        self.limit_records, self.records = limit_records, records


class OutOfOrderSequence(RequestError):
    """An idempotent producer's sequence leaves a gap (Kafka's OUT_OF_ORDER_SEQUENCE_NUMBER)."""


class ProducerFenced(RequestError):
    """An idempotent producer's epoch is older than one seen (Kafka's INVALID_PRODUCER_EPOCH)."""


class UnknownTransaction(RequestError):
    """No producer has used this transactional id, or not for a week."""


class TransactionRefused(RequestError):
    """A transaction's coordinator, or a log on its behalf, refuses a call. `reason`: Kafka's name
    of the error.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


# --- try again ------------------------------------------------------------------------------------


class RetriableError(TierlogError):
    """Nothing was changed; the same call may succeed after `retry_after_s` seconds."""

    def __init__(self, detail: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class StoreUnavailable(RetriableError):
    """The object store does not respond, throttles, or responds with a 5xx. `is_final`: sending the
    same request again would fail again.
    """

    is_final = False


class StoreUnreachable(StoreUnavailable):
    """No connection could be made, so no request was sent."""


class ManifestConflict(RetriableError):
    """Another commit created this version first: reload, check the epoch, apply again."""


class Throttled(RetriableError):
    pass


class LeaderUnknown(RetriableError):
    """No broker of the cluster is known to lead the partition: it is being moved, or its broker
    is down.
    """


class NotEnoughReplicas(RetriableError):
    """Fewer replicas are in sync than `min.insync.replicas`: nothing was appended."""


class WatermarkUnknown(RetriableError):
    """The leader is new, and does not know yet up to where its log is committed."""


class PeerUnavailable(RetriableError):
    """Another broker of the cluster does not answer, or refuses."""


class Starting(RetriableError):
    pass


class ShuttingDown(RetriableError):
    pass


class ConcurrentTransactions(RetriableError):
    """The id's last transaction is still being ended (Kafka's CONCURRENT_TRANSACTIONS)."""


class DiskFull(RetriableError):
    """ENOSPC, or only the reserve is left: writes are refused until there is space; reads work."""


class TooManyOpenFiles(DiskFull):
    """EMFILE, ENFILE or ENOMEM: refused like a full disk, but freeing disk space does not help."""


def disk_full_error(where: object, error: OSError, *, retry_after_s: float = 1.0) -> DiskFull:
    """The error to raise for an OSError for lack of disk space or of file descriptors."""
    kind = TooManyOpenFiles if error.errno in FILE_LIMIT_ERRNOS else DiskFull
    return kind(f"{where}: {error.strerror}", retry_after_s=retry_after_s)


class ObjectExists(TierlogError):
    """A create-if-absent failed (412): the object is another writer's, or our own earlier one."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: the object already exists")
        self.key = key


# --- verify, never guess --------------------------------------------------------------------------


class OutcomeUnknownError(TierlogError):
    """A write may or may not have taken effect: read back before doing anything else."""


class PeerAnswerLost(OutcomeUnknownError):
    """Another broker of the cluster was sent a write, and did not answer."""


class LeaderChanged(OutcomeUnknownError):
    """Another broker leads the partition now: what was appended and not committed may be lost."""


class NotReplicated(OutcomeUnknownError):
    """Appended, and then too few replicas were in sync to commit it (Kafka's
    NOT_ENOUGH_REPLICAS_AFTER_APPEND).
    """


class FencedError(TierlogError):
    """A newer epoch exists: stop writing (`leadership-lost`)."""


class NotLeader(TierlogError):
    """Another broker of the cluster leads the partition: send the request there. `kafka` is its
    listener, as host:port, or empty.
    """

    def __init__(
        self, place: str, *, node_id: int, url: str, kafka: str = "", leader_epoch: int = -1
    ) -> None:
        super().__init__(f"broker {node_id} at {url} leads {place}")
        self.node_id, self.url, self.kafka = node_id, url, kafka
        self.leader_epoch = leader_epoch

    @property
    def leader(self) -> dict[str, object]:
        return {"node_id": self.node_id, "url": self.url}


# Another broker of the cluster may carry the call out.
ELSEWHERE = (NotLeader, LeaderUnknown)
# In a cluster this passes, or another broker carries the call out. Nothing was changed.
WILL_PASS = (*ELSEWHERE, Starting)


# --- corrupt data ---------------------------------------------------------------------------------


class CorruptDataError(TierlogError):
    """Bytes from disk or bucket failed their checks. `file` is a path or an object key."""

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
        """The same error with the given parts of its location filled in or replaced."""
        return type(self)(
            self.detail,
            file=file or self.file,
            position=self.position if position is None else position,
            offset=self.offset if offset is None else offset,
        )


class eio_as:  # noqa: N801  as `contextlib.suppress`, and on each read's way
    """Raise `corrupt` for EIO: unreadable bytes are treated like those that fail a check.

    Other OSErrors pass through.
    """

    __slots__ = ("_corrupt", "_file", "_position")

    def __init__(
        self, corrupt: type[CorruptDataError], *, file: str, position: int | None = None
    ) -> None:
        self._corrupt, self._file, self._position = corrupt, file, position

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            detail = f"cannot be read: {error.strerror}"
            raise self._corrupt(detail, file=self._file, position=self._position) from error


class CorruptBatch(CorruptDataError):
    pass


class CorruptIndex(CorruptDataError):
    pass


class CorruptSnapshot(CorruptDataError):
    """A producer snapshot, checkpoint or epoch file."""


class CorruptManifest(CorruptDataError):
    pass


class UnknownFormatVersion(CorruptDataError):
    """Written by another version of tierlog: refused by its number rather than misread."""


class UndecodableValue(CorruptDataError):
    """A record's value is not what its schema says. `file` is its partition; `row`, of a batch."""

    def __init__(
        self,
        detail: str,
        *,
        file: str = "",
        position: int | None = None,
        offset: int | None = None,
        row: int = 0,
    ) -> None:
        super().__init__(detail, file=file, position=position, offset=offset)
        self.row = row


class ColumnsTooLarge(UndecodableValue):
    """Values take more memory as columns than a batch may; of several, a part may do."""


class CorruptObject(CorruptDataError):
    """An object whose bytes fail the checksum in the manifest or chunk table."""


class MissingObject(CorruptDataError):
    """An object that a manifest references is not in the bucket."""


class LogOfflineError(TierlogError):
    """The local disk failed; this log is closed until the broker restarts."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix for an error message, such as `; did you mean 'orders'?`; "" without a match."""
    match = closest_match(name, known, cutoff=0.75)
    return f"; did you mean {match!r}?" if match is not None else ""


def closest_match(name: str, known: Iterable[str], *, cutoff: float) -> str | None:
    """The most similar name; None below `cutoff`, from 0 (nothing in common) to 1 (equal)."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=cutoff)), None)


for _kind in list(globals().values()):
    if isinstance(_kind, type) and issubclass(_kind, TierlogError):
        _kind.__module__ = "tierlog.errors"  # what users import, and see in a traceback
