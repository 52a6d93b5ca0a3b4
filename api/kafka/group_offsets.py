"""OffsetCommit and OffsetFetch, and what an admin sees and changes of groups: DescribeGroups,
ListGroups, DeleteGroups, OffsetDelete.

* All wait for a flush or a lock, so all run in a thread.
* A token with a topic prefix commits, sees and deletes only offsets of topics with that prefix, and
  sees the groups that read such a topic, as over HTTP. Deleting needs `admin`.
* A refusal of the group is answered for each of its partitions; one of a partition for that alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused, code_of
from tierlog.api.kafka.groups import check_group, coordinator_code, coordinator_of
from tierlog.api.kafka.operations import operations_of_group
from tierlog.api.kafka.partitions import ADMINISTERING, topic_of, topic_of_id
from tierlog.api.serving.grants import Scope
from tierlog.broker.group_coordinator.group_events import Identity, State
from tierlog.broker.group_coordinator.group_states import CLASSIC, GroupState, TopicPartitions
from tierlog.broker.group_coordinator.groups import Groups, NewOffset
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import Commit
from tierlog.record_format.errors import (
    Forbidden,
    GroupRefused,
    RecordTooLarge,
    RequestError,
    TierlogError,
    UnknownGroup,
    UnknownTopic,
    UnknownTopicOrPartition,
)
from tierlog.record_format.kafka_messages.messages import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

Found = TypeVar("Found")
READ: Final = (Scope.READ,)
_WITH_IDS: Final = 10
_WITH_EPOCHS: Final = 9  # members of consumer groups commit, and an unknown group is told
_FETCH_SEVERAL_FROM, _FETCH_ERROR_FROM = 8, 2
_DESCRIBE_NOT_FOUND_FROM: Final = 6

CommitTopic = OffsetCommitRequest.OffsetCommitRequestTopic
CommitPartition = OffsetCommitRequest.OffsetCommitRequestPartition
_CommittedTopic = OffsetCommitResponse.OffsetCommitResponseTopic
_Committed = OffsetCommitResponse.OffsetCommitResponsePartition
_Fetched = OffsetFetchResponse.OffsetFetchResponsePartitions
_FetchedTopic = OffsetFetchResponse.OffsetFetchResponseTopics
_FetchedGroup = OffsetFetchResponse.OffsetFetchResponseGroup
_Described = DescribeGroupsResponse.DescribedGroup


def group_code(error: BaseException) -> Code:
    """For what a call of the coordinator raises."""
    if isinstance(error, GroupRefused | UnknownGroup | Refused):
        return code_of(error)
    if isinstance(error, Forbidden):
        return Code.GROUP_AUTHORIZATION_FAILED
    if isinstance(error, UnknownTopicOrPartition):
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if isinstance(error, RecordTooLarge):
        return Code.INVALID_COMMIT_OFFSET_SIZE
    return coordinator_code(error)


# --- OffsetCommit ---------------------------------------------------------------------------------


async def offset_commit(call: Call, request: OffsetCommitRequest) -> OffsetCommitResponse:
    checked = CheckedOffsets(call, request.topics)
    refusal = check_group(call, request.group_id)
    if refusal is None and checked.offsets:
        try:
            await call.context.write(
                call.context.broker.groups.commit_offsets,
                request.group_id,
                list(checked.offsets.values()),
                member=Identity(request.member_id, request.group_instance_id),
                generation=request.generation_id_or_member_epoch,
                is_old=call.version < _WITH_EPOCHS,
            )
        except (TierlogError, OSError) as error:
            refusal = _commit_code(call, error)
    return OffsetCommitResponse(topics=checked.answered(refusal or Code.NONE))


def _commit_code(call: Call, error: BaseException) -> Code:
    code = group_code(error)
    if code is Code.GROUP_ID_NOT_FOUND and call.version < _WITH_EPOCHS:
        return Code.ILLEGAL_GENERATION
    return code


class CheckedOffsets:
    """`offsets`: those that may be committed, by topic and partition; the last of one counts."""

    def __init__(self, call: Call, topics: Iterable[CommitTopic]) -> None:
        self._call = call
        self.offsets: dict[tuple[str, int], NewOffset] = {}
        self._topics = [self._check(topic) for topic in topics]

    def answered(self, code: Code) -> list[_CommittedTopic]:
        """The answer, where the commit of those that were checked had this result."""
        for topic in self._topics:
            for one in topic.partitions:
                one.error_code = one.error_code or code
        return self._topics

    def _check(self, wanted: CommitTopic) -> _CommittedTopic:
        code, found = Code.NONE, None
        try:
            found = _topic(self._call, wanted.name, wanted.topic_id)
        except TierlogError as error:
            code = code_of(error)
        checked = [self._check_one(found, one, code) for one in wanted.partitions]
        return _CommittedTopic(name=wanted.name, topic_id=wanted.topic_id, partitions=checked)

    def _check_one(self, topic: Topic | None, one: CommitPartition, code: Code) -> _Committed:
        metadata = one.committed_metadata or ""
        if topic is not None:
            name = topic.record.name
            if not _has(topic, one.partition_index):
                code = Code.UNKNOWN_TOPIC_OR_PARTITION
            elif (
                len(metadata.encode())
                > self._call.context.broker.settings.offset_metadata_max_bytes
            ):
                code = Code.OFFSET_METADATA_TOO_LARGE
            elif one.committed_offset < 0:
                code = Code.OFFSET_OUT_OF_RANGE
            else:
                self.offsets[name, one.partition_index] = NewOffset(
                    name,
                    one.partition_index,
                    one.committed_offset,
                    metadata,
                    topic.record.topic_id,
                    one.committed_leader_epoch,
                )
        return _Committed(partition_index=one.partition_index, error_code=code)


def _has(topic: Topic, number: int) -> bool:
    """Here, or elsewhere in the cluster."""
    try:
        topic.check_number(number)
    except TierlogError:
        return False
    return True


def _topic(call: Call, name: str, topic_id: bytes) -> Topic:
    """By id from version 10 on. Raises Forbidden, UnknownTopic, Refused."""
    if call.version >= _WITH_IDS:
        return topic_of_id(call, topic_id, READ)
    return topic_of(call, name, READ)


# --- OffsetFetch ----------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """A group's offsets that a client asks for; `topics` is None for all. `stable`: none that a
    transaction in progress may change. `member_id` and `epoch`: of a member of a consumer group.
    """

    group: str
    topics: Sequence[OffsetFetchRequest.OffsetFetchRequestTopics] | None
    stable: bool = False
    member_id: str | None = None
    epoch: int = -1


async def offset_fetch(call: Call, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """What was accepted before is seen. Who asks for stable offsets is told where a transaction in
    progress may change one (KIP-447).
    """
    if call.version >= _FETCH_SEVERAL_FROM:
        stable = request.require_stable
        asked = [
            _Asked(one.group_id, one.topics, stable, one.member_id, one.member_epoch)
            for one in request.groups
        ]
        return OffsetFetchResponse(groups=await _fetch_all(call, asked))
    (group,) = await _fetch_all(call, [_asked(request)])
    return _of_one(call, group)


def _asked(request: OffsetFetchRequest) -> _Asked:
    if request.topics is None:
        return _Asked(request.group_id, None, stable=request.require_stable)
    topics = [
        OffsetFetchRequest.OffsetFetchRequestTopics(
            name=one.name, partition_indexes=one.partition_indexes
        )
        for one in request.topics
    ]
    return _Asked(request.group_id, topics, stable=request.require_stable)


def _of_one(call: Call, group: _FetchedGroup) -> OffsetFetchResponse:
    """The answer before version 8; before 2, an error of the group is each partition's."""
    code = group.error_code
    return OffsetFetchResponse(
        error_code=code if call.version >= _FETCH_ERROR_FROM else Code.NONE,
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartition(
                        partition_index=one.partition_index,
                        committed_offset=one.committed_offset,
                        committed_leader_epoch=one.committed_leader_epoch,
                        metadata=one.metadata,
                        error_code=one.error_code or code,
                    )
                    for one in topic.partitions
                ],
            )
            for topic in group.topics
        ],
    )


async def _fetch_all(call: Call, asked: Sequence[_Asked]) -> list[_FetchedGroup]:
    confirmed = [call.context.broker.groups.confirm(one.group) for one in asked]
    await asyncio.gather(*map(asyncio.wrap_future, confirmed), return_exceptions=True)
    return await call.context.read(_fetch_each, call, asked, confirmed)


def _fetch_each(
    call: Call, asked: Sequence[_Asked], confirmed: Sequence[Future[None]]
) -> list[_FetchedGroup]:
    return [_fetch(call, *one) for one in zip(asked, confirmed, strict=True)]


def _fetch(call: Call, asked: _Asked, confirmed: Future[None]) -> _FetchedGroup:
    code, commits = check_group(call, asked.group), dict[tuple[str, int], Commit]()
    unstable: set[tuple[str, int]] = set()
    if code is None:
        try:
            confirmed.result()
            call.context.broker.groups.check_fetch(asked.group, asked.member_id, asked.epoch)
            if asked.stable:  # first: what is decided meanwhile is among the commits
                unstable = call.context.broker.groups.unstable(asked.group)
            commits = call.context.broker.groups.committed(asked.group)
        except (TierlogError, OSError) as error:
            code = group_code(error)
    if code is not None:
        topics = [_refused(one, code) for one in asked.topics or ()]
        is_old = call.version < _FETCH_ERROR_FROM
        return _FetchedGroup(group_id=asked.group, error_code=code, topics=topics if is_old else [])
    if asked.topics is None:
        found = list(_all_fetched(call, commits))
    else:
        found = [_topic_fetched(call, one, commits) for one in asked.topics]
    for topic in found if unstable else ():
        topic.partitions = [
            _fetched(one.partition_index, None, Code.UNSTABLE_OFFSET_COMMIT)
            if (topic.name, one.partition_index) in unstable
            else one
            for one in topic.partitions
        ]
    return _FetchedGroup(group_id=asked.group, topics=found)


def _all_fetched(call: Call, commits: Mapping[tuple[str, int], Commit]) -> Iterator[_FetchedTopic]:
    by_topic: dict[str, list[int]] = {}
    for place, partition in sorted(commits):
        by_topic.setdefault(place, []).append(partition)
    for name, partitions in by_topic.items():
        if not call.session.grant.sees_topic(name):
            continue
        with suppress(UnknownTopic):  # it was deleted meanwhile
            topic = call.context.broker.topic(name)
            yield _FetchedTopic(
                name=name,
                topic_id=parse_topic_id(topic.record.topic_id).bytes,
                partitions=[_fetched(one, commits.get((name, one))) for one in partitions],
            )


def _topic_fetched(
    call: Call,
    wanted: OffsetFetchRequest.OffsetFetchRequestTopics,
    commits: Mapping[tuple[str, int], Commit],
) -> _FetchedTopic:
    """A topic that does not exist has no commits, unless it is asked for by its id."""
    name = wanted.name
    try:
        if call.version >= _WITH_IDS:
            name = topic_of_id(call, wanted.topic_id, READ).record.name
        call.session.grant.check_topic(name)
    except TierlogError as error:
        return _refused(wanted, code_of(error))
    return _FetchedTopic(
        name=name,
        topic_id=wanted.topic_id,
        partitions=[_fetched(one, commits.get((name, one))) for one in wanted.partition_indexes],
    )


def _refused(wanted: OffsetFetchRequest.OffsetFetchRequestTopics, code: Code) -> _FetchedTopic:
    return _FetchedTopic(
        name=wanted.name,
        topic_id=wanted.topic_id,
        partitions=[_fetched(one, None, code) for one in wanted.partition_indexes],
    )


def _fetched(partition: int, commit: Commit | None, code: Code = Code.NONE) -> _Fetched:
    found = commit or Commit(-1)
    return _Fetched(
        partition_index=partition,
        committed_offset=found.offset,
        committed_leader_epoch=found.leader_epoch,
        metadata=found.metadata,
        error_code=code,
    )


# --- DescribeGroups, ListGroups -------------------------------------------------------------------


async def describe_groups(call: Call, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    return DescribeGroupsResponse(
        groups=await call.context.read(
            _each, request.groups, lambda name: _described(call, request, name)
        )
    )


def _each(names: Iterable[str], find: Callable[[str], _Described]) -> list[_Described]:
    return list(map(find, names))


def _described(call: Call, request: DescribeGroupsRequest, name: str) -> _Described:
    code, found = check_group(call, name), GroupState(name)
    detail = f"Group {name} not found."
    try:
        if code is None:
            found = seen_group(call, name)
            if found.type != CLASSIC:
                code, found = Code.GROUP_ID_NOT_FOUND, GroupState(name)
                detail = f"Group {name} is not a classic group."
    except (TierlogError, OSError) as error:
        code = group_code(error)
    if code is Code.GROUP_ID_NOT_FOUND and call.version < _DESCRIBE_NOT_FOUND_FROM:
        code = None
    described = _Described(
        error_code=code or Code.NONE,
        group_id=name,
        group_state="" if code not in (None, Code.GROUP_ID_NOT_FOUND) else found.state,
        protocol_type=found.protocol_type,
        protocol_data=found.protocol,
        members=[
            DescribeGroupsResponse.DescribedGroupMember(
                member_id=one.member_id,
                group_instance_id=one.instance_id,
                client_id=one.client_id,
                client_host=one.client_host,
                member_metadata=one.metadata,
                member_assignment=one.assignment,
            )
            for one in found.members
        ],
    )
    if code is Code.GROUP_ID_NOT_FOUND:
        described.error_message = detail
    if request.include_authorized_operations and code is None:
        described.authorized_operations = operations_of_group(call)
    return described


def seen_group(call: Call, name: str) -> GroupState:
    """Raises UnknownGroup, and Forbidden for a group that reads only topics of others."""
    groups = call.context.broker.groups
    found, commits = coordinator_of(call).describe(name), groups.committed(name)
    if found is None and not commits:
        raise UnknownGroup(f"there is no group {name!r}")
    if call.session.grant.topics:
        topics = {topic for topic, _ in commits}
        topics |= coordinator_of(call).subscribed_topics(name) or frozenset()
        if topics and not any(map(call.session.grant.sees_topic, topics)):
            raise Forbidden(f"group {name!r} reads no topic that this token may see")
    return found or GroupState(name, State.EMPTY)


def find_to_describe(
    call: Call, name: str, find: Callable[[str], Found | None], *, kind: str
) -> Found:
    """A group of this kind, or Refused with what Kafka says."""
    code = check_group(call, name)
    if code is None:
        try:
            seen_group(call, name)
            found = find(name)
        except (TierlogError, OSError) as error:
            code = group_code(error)
        else:
            if found is not None:
                return found
            raise Refused(Code.GROUP_ID_NOT_FOUND, f"Group {name} is not a {kind} group.")
    is_unknown = code is Code.GROUP_ID_NOT_FOUND
    raise Refused(code, f"Group {name} not found." if is_unknown else "")


def check_sees(call: Call, places: Iterable[TopicPartitions]) -> None:
    """Raises Refused if the token may not see one of the topics."""
    if not all(call.session.grant.sees_topic(one.topic) for one in places):
        raise Refused(Code.TOPIC_AUTHORIZATION_FAILED)


async def list_groups(call: Call, request: ListGroupsRequest) -> ListGroupsResponse:
    try:
        call.session.grant.check_scopes(READ)
        return ListGroupsResponse(groups=await call.context.read(_listed, call, request))
    except Forbidden:
        return ListGroupsResponse()  # as Kafka: what a client may not see is not there
    except (TierlogError, OSError) as error:
        return ListGroupsResponse(error_code=coordinator_code(error))


def _listed(call: Call, request: ListGroupsRequest) -> list[ListGroupsResponse.ListedGroup]:
    states = {one.strip().lower() for one in request.states_filter}
    types = {one.strip().lower() for one in request.types_filter}
    found = []
    for name in call.context.broker.groups.names():
        try:
            group = seen_group(call, name)
        except RequestError:  # deleted meanwhile, or of others
            continue
        has_state = not states or group.state.lower() in states
        if has_state and (not types or group.type in types):
            found.append(
                ListGroupsResponse.ListedGroup(
                    group_id=name,
                    protocol_type=group.protocol_type,
                    group_state=group.state,
                    group_type=group.type,
                )
            )
    return found


# --- DeleteGroups, OffsetDelete -------------------------------------------------------------------


async def delete_groups(call: Call, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    results = []
    for name in request.groups_names:
        code = check_group(call, name, ADMINISTERING)
        if code is None:
            code = await _deleted(call, name)
        results.append(DeleteGroupsResponse.DeletableGroupResult(group_id=name, error_code=code))
    return DeleteGroupsResponse(results=results)


async def _deleted(call: Call, name: str) -> Code:
    def check(topics: set[str]) -> None:
        for topic in topics or {""}:  # without offsets it is nobody's of a prefix
            call.session.grant.check_topic(topic)

    try:
        await call.context.write(call.context.broker.delete_group, name, check=check)
    except (TierlogError, OSError) as error:
        return group_code(error)
    return Code.NONE


async def offset_delete(call: Call, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    if (code := check_group(call, request.group_id, ADMINISTERING)) is not None:
        return OffsetDeleteResponse(error_code=code)
    codes = {topic.name: _delete_code(call, topic.name) for topic in request.topics}
    places = [
        (topic.name, one.partition_index)
        for topic in request.topics
        for one in topic.partitions
        if codes[topic.name] is Code.NONE
    ]
    groups: Groups = call.context.broker.groups
    try:
        kept = await call.context.write(groups.delete_offsets, request.group_id, places)
    except (TierlogError, OSError) as error:
        return OffsetDeleteResponse(error_code=group_code(error))
    codes |= dict.fromkeys(kept, Code.GROUP_SUBSCRIBED_TO_TOPIC)
    return OffsetDeleteResponse(
        topics=[
            OffsetDeleteResponse.OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetDeleteResponse.OffsetDeleteResponsePartition(
                        partition_index=one.partition_index, error_code=codes[topic.name]
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _delete_code(call: Call, name: str) -> Code:
    try:
        topic_of(call, name, READ)
    except TierlogError as error:
        return code_of(error)
    return Code.NONE
