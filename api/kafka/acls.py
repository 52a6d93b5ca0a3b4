"""DescribeAcls, CreateAcls, DeleteAcls: what tokens may do, as Kafka's ACLs. Only the command line
changes tokens, so the others are refused as by a broker without an authorizer.

| scope | as an ACL |
|---|---|
| `read` | READ of the topics and of all groups |
| `produce` | WRITE of the topics, IDEMPOTENT_WRITE of the cluster |
| `cluster` | CLUSTER_ACTION of the cluster |
| `admin` | ALL of the topics, of all groups and, without a prefix, of the cluster |

The topics are those with the token's prefix, or `*`. A token with a prefix does not see other
tokens, and only `admin` sees any.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.operations import Operation
from tierlog.api.kafka.partitions import ADMINISTERING, refusal_of
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import TokenEntry
from tierlog.record_format.kafka_messages.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

_NO_TOKENS = "No Authorizer is configured: this broker requires no tokens."
_TOKENS = "Tokens decide who may do what: tierlog token create, tierlog token revoke."


class Resource(IntEnum):
    """As in org.apache.kafka.common.resource.ResourceType."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4


class Pattern(IntEnum):
    """As in org.apache.kafka.common.resource.PatternType."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


_ANY, _ALLOW = 1, 3  # of AclPermissionType
_EVERY_NAME, _EVERY_HOST, _CLUSTER = "*", "*", "kafka-cluster"


class Acl(NamedTuple):
    resource: Resource
    name: str
    pattern: Pattern
    principal: str
    operation: Operation


def describe_acls(call: Call, request: DescribeAclsRequest) -> DescribeAclsResponse:
    tokens = call.context.access.tokens
    if tokens is None or not tokens.required:
        return DescribeAclsResponse(error_code=Code.SECURITY_DISABLED, error_message=_NO_TOKENS)
    if refusal := refusal_of(call, ADMINISTERING):
        return DescribeAclsResponse(
            error_code=Code.CLUSTER_AUTHORIZATION_FAILED, error_message=refusal
        )
    grant = call.session.grant
    shown = (one for one in tokens.entries if not grant.topics or one.name == grant.name)
    found: dict[tuple[Resource, str, Pattern], list[DescribeAclsResponse.AclDescription]] = {}
    for acl in (acl for token in shown for acl in _acls_of(token) if _matches(request, acl)):
        found.setdefault(acl[:3], []).append(
            DescribeAclsResponse.AclDescription(
                principal=acl.principal,
                host=_EVERY_HOST,
                operation=acl.operation,
                permission_type=_ALLOW,
            )
        )
    return DescribeAclsResponse(
        resources=[
            DescribeAclsResponse.DescribeAclsResource(
                resource_type=resource, resource_name=name, pattern_type=pattern, acls=acls
            )
            for (resource, name, pattern), acls in found.items()
        ]
    )


def _acls_of(token: TokenEntry) -> Iterator[Acl]:
    topics = (
        (Resource.TOPIC, token.topics, Pattern.PREFIXED)
        if token.topics
        else (Resource.TOPIC, _EVERY_NAME, Pattern.LITERAL)
    )
    groups = (Resource.GROUP, _EVERY_NAME, Pattern.LITERAL)
    cluster = (Resource.CLUSTER, _CLUSTER, Pattern.LITERAL)
    user = f"User:{token.name}"
    if Scope.ADMIN in token.scopes:
        yield Acl(*topics, user, Operation.ALL)
        yield Acl(*groups, user, Operation.ALL)
        if not token.topics:
            yield Acl(*cluster, user, Operation.ALL)
    if Scope.READ in token.scopes:
        yield Acl(*topics, user, Operation.READ)
        yield Acl(*groups, user, Operation.READ)
    if Scope.PRODUCE in token.scopes:
        yield Acl(*topics, user, Operation.WRITE)
        yield Acl(*cluster, user, Operation.IDEMPOTENT_WRITE)
    if Scope.CLUSTER in token.scopes:
        yield Acl(*cluster, user, Operation.CLUSTER_ACTION)


def _matches(wanted: DescribeAclsRequest, acl: Acl) -> bool:
    return (
        wanted.resource_type_filter in (Resource.ANY, acl.resource)
        and wanted.principal_filter in (None, acl.principal)
        and wanted.host_filter in (None, _EVERY_HOST)
        and wanted.operation in (Operation.ANY, acl.operation)
        and wanted.permission_type in (_ANY, _ALLOW)
        and _matches_name(wanted.resource_name_filter, wanted.pattern_type_filter, acl)
    )


def _matches_name(name: str | None, pattern: int, acl: Acl) -> bool:
    """MATCH: the ACLs that apply to the resource of this name."""
    if pattern not in (Pattern.ANY, Pattern.MATCH, acl.pattern):
        return False
    if name is None or name == acl.name:
        return True
    if pattern != Pattern.MATCH:
        return False
    return acl.name == _EVERY_NAME or (
        acl.pattern is Pattern.PREFIXED and name.startswith(acl.name)
    )


def _refusal(call: Call) -> str:
    return _TOKENS if call.context.access.requires_tokens() else _NO_TOKENS


def create_acls(call: Call, request: CreateAclsRequest) -> CreateAclsResponse:
    refused = CreateAclsResponse.AclCreationResult(
        error_code=Code.SECURITY_DISABLED, error_message=_refusal(call)
    )
    return CreateAclsResponse(results=[refused] * len(request.creations))


def delete_acls(call: Call, request: DeleteAclsRequest) -> DeleteAclsResponse:
    refused = DeleteAclsResponse.DeleteAclsFilterResult(
        error_code=Code.SECURITY_DISABLED, error_message=_refusal(call)
    )
    return DeleteAclsResponse(filter_results=[refused] * len(request.filters))
