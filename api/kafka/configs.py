"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources.

* Every key is listed, ours too, and what was listed is taken back.
* A broker's settings are shown and not changed: they are read when it starts. Groups have keys of
  their own (resource type 32).
* Each resource is changed as a whole or refused; one that is named twice is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.config_entries import (
    Entry,
    Source,
    broker_entries,
    changed_value,
    entries_of,
    group_entries,
)
from tierlog.api.kafka.error_codes import Code, Refused, code_of, text_of
from tierlog.api.kafka.nodes import nodes_of, own_id
from tierlog.api.kafka.partitions import (
    ADMINISTERING,
    DESCRIBING,
    refusal_of,
    seen_topics,
    topic_of,
)
from tierlog.api.kafka.topic_changes import repeated
from tierlog.broker.internal_topics import check_may_alter
from tierlog.hot_tier.log_config import KEYS_BY_NAME, LogConfig
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.kafka_messages.messages import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from tierlog.record_format.topic_rules import ConfigValue

Changes = Mapping[str, ConfigValue | None]
Row = TypeVar("Row")


class Resource(IntEnum):
    TOPIC = 2
    BROKER = 4
    GROUP = 32


class Operation(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Configured(Protocol):
    """A topic's configuration, or a group's: what it has of its own."""

    @property
    def overrides(self) -> Mapping[str, ConfigValue]: ...


class GroupOverrides(NamedTuple):
    overrides: Mapping[str, ConfigValue]


class AlteredResource(Protocol):
    """Of either call that alters."""

    @property
    def resource_type(self) -> int: ...
    @property
    def resource_name(self) -> str: ...


# --- describing -----------------------------------------------------------------------------------


def describe_configs(call: Call, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    return DescribeConfigsResponse(
        results=[
            _described(
                call,
                resource,
                synonyms=request.include_synonyms,
                docs=request.include_documentation,
            )
            for resource in request.resources
        ]
    )


def _described(
    call: Call,
    wanted: DescribeConfigsRequest.DescribeConfigsResource,
    *,
    synonyms: bool,
    docs: bool,
) -> DescribeConfigsResponse.DescribeConfigsResult:
    result = DescribeConfigsResponse.DescribeConfigsResult(
        resource_type=wanted.resource_type, resource_name=wanted.resource_name
    )
    keys = wanted.configuration_keys
    try:
        result.configs = [
            _shown(entry, synonyms=synonyms, docs=docs)
            for entry in _entries(call, wanted.resource_type, wanted.resource_name)
            if keys is None or entry.name in keys
        ]
    except TierlogError as error:
        result.error_code, result.error_message = _refusal(error, wanted.resource_type)
    return result


def _entries(call: Call, kind: int, name: str) -> Iterable[Entry]:
    """Raises Refused, Forbidden, UnknownTopic."""
    if kind == Resource.TOPIC:
        topic = topic_of(call, name, DESCRIBING)
        return entries_of(topic.config, replication_factor=topic.record.replication_factor)
    if kind == Resource.BROKER:
        call.session.grant.check_scopes(DESCRIBING)
        if not name:  # the defaults of all brokers, of which none is set here
            return ()
        _check_broker(call, name)
        return broker_entries(call.context.broker_configs)
    if kind == Resource.GROUP:
        call.session.grant.check_scopes(DESCRIBING)
        if not name:
            raise Refused(Code.INVALID_REQUEST, "Group name must not be empty")
        return group_entries(call.context.broker.group_configs, name)
    raise _unsupported(kind)


def _unsupported(kind: int) -> Refused:
    return Refused(Code.INVALID_REQUEST, f"Unsupported resource type: {kind}")


def _check_broker(call: Call, name: str) -> None:
    """Raises Refused."""
    if name != str(own_id(call)):
        raise Refused(
            Code.INVALID_REQUEST,
            f"Unexpected broker id, expected {own_id(call)} or empty string, but received {name}",
        )


def _shown(
    entry: Entry, *, synonyms: bool, docs: bool
) -> DescribeConfigsResponse.DescribeConfigsResourceResult:
    shown = DescribeConfigsResponse.DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        config_type=entry.type,
        documentation=entry.doc if docs else None,
    )
    if synonyms:
        shown.synonyms = [
            DescribeConfigsResponse.DescribeConfigsSynonym(*one) for one in _synonyms(entry)
        ]
    return shown


def _synonyms(entry: Entry) -> list[tuple[str, str | None, int]]:
    """Name, value and source: of what counts, and of what would without it."""
    own = entry.name if entry.source == Source.GROUP else entry.inherited or entry.name
    found = [(own, entry.value, int(entry.source))]
    if entry.source not in (Source.DEFAULT, entry.default_source) and entry.default is not None:
        found.append((entry.inherited or entry.name, entry.default, int(entry.default_source)))
    return found


def list_config_resources(
    call: Call, request: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    """Version 0 is about client metrics alone, of which there are none."""
    if call.version == 0:
        return ListConfigResourcesResponse()
    kinds = set(request.resource_types) or {*Resource}
    if refusal_of(call, DESCRIBING):
        return ListConfigResourcesResponse(error_code=Code.CLUSTER_AUTHORIZATION_FAILED)
    found: list[tuple[str, int]] = []
    if Resource.TOPIC in kinds:
        found += [(name, Resource.TOPIC) for name in seen_topics(call)]
    if Resource.GROUP in kinds:
        found += [(name, Resource.GROUP) for name in call.context.broker.group_configs.names()]
    if Resource.BROKER in kinds:
        found += [(str(one.node_id), Resource.BROKER) for one in nodes_of(call)]
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponse.ConfigResource(resource_name=name, resource_type=kind)
            for name, kind in found
        ]
    )


# --- altering -------------------------------------------------------------------------------------


async def alter_configs(call: Call, request: AlterConfigsRequest) -> AlterConfigsResponse:
    """What is not given gets its default back."""
    row = AlterConfigsResponse.AlterConfigsResourceResponse
    return AlterConfigsResponse(responses=await _alter_all(call, request, _replacing, row))


async def incremental_alter_configs(
    call: Call, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    row = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse
    return IncrementalAlterConfigsResponse(
        responses=await _alter_all(call, request, _changing, row)
    )


async def _alter_all(
    call: Call,
    request: AlterConfigsRequest | IncrementalAlterConfigsRequest,
    changing: Callable[[Any], Callable[[Configured], Changes]],
    row: Callable[[int, str | None, int, str], Row],
) -> list[Row]:
    """A row for each resource, of its code, its message and what it is."""
    twice = repeated(f"{one.resource_type} {one.resource_name}" for one in request.resources)
    rows = []
    for one in request.resources:
        code, text = int(Code.NONE), None
        try:
            if f"{one.resource_type} {one.resource_name}" in twice:
                raise Refused(Code.INVALID_REQUEST, "Each resource must appear at most once.")
            await _alter(call, one, changing(one), validate_only=request.validate_only)
        except (TierlogError, OSError) as error:
            code, text = _refusal(error, one.resource_type)
        rows.append(row(code, text, one.resource_type, one.resource_name))
    return rows


async def _alter(
    call: Call,
    resource: AlteredResource,
    change: Callable[[Configured], Changes],
    *,
    validate_only: bool,
) -> None:
    broker, name = call.context.broker, resource.resource_name
    if resource.resource_type == Resource.BROKER:
        call.session.grant.check_scopes(ADMINISTERING)
        if name:
            _check_broker(call, name)
        if not change(GroupOverrides({})):
            return  # what is not set is reset, as by kafka-reassign-partitions.sh
        raise Refused(
            Code.INVALID_REQUEST,
            "the settings of a broker are read when it starts: change them there",
        )
    if resource.resource_type == Resource.GROUP:
        await _alter_group(call, name, change, validate_only=validate_only)
        return
    if resource.resource_type != Resource.TOPIC:
        raise _unsupported(resource.resource_type)
    config = change(topic_of(call, name, ADMINISTERING).config)
    check_may_alter(name, config=config, partitions=None)
    if validate_only:
        broker.check_altered_topic(name, config=config)
    else:
        await call.context.write(broker.alter_topic, name, config=config)


async def _alter_group(
    call: Call, name: str, change: Callable[[Configured], Changes], *, validate_only: bool
) -> None:
    call.session.grant.check_scopes(ADMINISTERING)
    if not name:
        raise Refused(Code.INVALID_REQUEST, "Default group resources are not allowed.")
    broker = call.context.broker
    await call.context.read(broker.group_configs.load)
    config = change(GroupOverrides(broker.group_configs.overrides(name)))
    if validate_only:
        broker.group_configs.checked(name, config)
    else:
        await call.context.write(broker.alter_group, name, config)


def _refusal(error: Exception, kind: int) -> tuple[int, str | None]:
    code = code_of(error)
    if code is Code.TOPIC_AUTHORIZATION_FAILED and kind != Resource.TOPIC:
        code = Code.CLUSTER_AUTHORIZATION_FAILED
    return code, text_of(error)


def _replacing(
    resource: AlterConfigsRequest.AlterConfigsResource,
) -> Callable[[Configured], Changes]:
    def changes(now: Configured) -> Changes:
        _check_once(one.name for one in resource.configs)
        for one in resource.configs:
            _check_value(one.name, one.value)
        given = {one.name: one.value for one in resource.configs}
        return {**dict.fromkeys(now.overrides), **given}

    return changes


def _changing(
    resource: IncrementalAlterConfigsRequest.AlterConfigsResource,
) -> Callable[[Configured], Changes]:
    def changes(now: Configured) -> Changes:
        _check_once(one.name for one in resource.configs)
        return {one.name: _changed(now, one) for one in resource.configs if not is_unset(now, one)}

    def is_unset(now: Configured, one: IncrementalAlterConfigsRequest.AlterableConfig) -> bool:
        """As in Kafka: MirrorMaker resets keys that only its source has."""
        is_known = one.name in KEYS_BY_NAME or one.name in now.overrides
        return one.config_operation == Operation.DELETE and not is_known

    return changes


def _check_once(names: Iterable[str]) -> None:
    if twice := repeated(names):
        text = f"Error due to duplicate config keys: {', '.join(sorted(twice))}"
        raise Refused(Code.INVALID_REQUEST, text)


def _check_value(name: str, value: str | None) -> None:
    if value is None:
        raise Refused(Code.INVALID_REQUEST, f"Null value not supported for : {name}")


def _changed(
    now: Configured, one: IncrementalAlterConfigsRequest.AlterableConfig
) -> ConfigValue | None:
    """The value to set; None for the default. Raises Refused."""
    operation = one.config_operation
    if operation == Operation.DELETE:
        return None
    _check_value(one.name, one.value)
    assert one.value is not None, "checked"
    if operation == Operation.SET:
        return one.value
    if operation not in (Operation.APPEND, Operation.SUBTRACT):
        text = f"Unknown operation type {operation} for {one.name}"
        raise Refused(Code.INVALID_REQUEST, text)
    key = KEYS_BY_NAME.get(one.name)
    if key is None or key.kind != "list" or not isinstance(now, LogConfig):
        what = Operation(operation).name
        raise Refused(
            Code.INVALID_CONFIG,
            f"Can't {what} to key {one.name} because its type is not LIST.",
        )
    items = [item for item in str(changed_value(now, one.name)).split(",") if item]
    named = one.value.split(",")
    if operation == Operation.APPEND:
        items += [item for item in named if item not in items]
    else:
        items = [item for item in items if item not in named]
    return ",".join(items)
