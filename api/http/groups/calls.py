"""The calls on groups and transactions, in one table."""

from __future__ import annotations

from functools import partial
from typing import Final

from tierlog.api.http import schemas
from tierlog.api.http.calls import ELSEWHERE, NO_PARTITION, Body, Call
from tierlog.api.http.groups import handlers, members, transactions
from tierlog.api.http.header_values import JSON

_GROUP: Final = "/v1/groups/{group}"
_TRANSACTION: Final = "/v1/transactions/{transactional_id}"
# Of a call on groups that has to load their offsets from the log first.
_REBUILDING: Final = (
    *ELSEWHERE,
    "leadership-lost",
    "cold-object-missing",
    "cold-object-corrupt",
    "corrupt-log",
    "starting",
    "store-unavailable",
)
_REBUILDING_TO_WRITE: Final = (*_REBUILDING, "log-offline", "disk-full")

_call = partial(Call, tag="groups")
_transaction_call = partial(Call, tag="transactions")

GROUP_CALLS: Final = (
    _call(
        method="PUT",
        path=_GROUP + "/offsets",
        endpoint=handlers.commit_offsets,
        summary="Commit the offsets that a group reads next",
        description="The commit is durable when the call returns. Partitions that are not listed "
        "keep their offsets. With `topic_id` (as in `Log-Topic-Id`) a commit is refused if the "
        "topic was deleted and re-created meanwhile.",
        body={
            JSON: Body(
                schema=handlers.OffsetsToCommit,
                example={"offsets": [{"topic": "flights", "partition": 0, "offset": 1000}]},
            )
        },
        status=204,
        problems=(*NO_PARTITION, "group-refused", *_REBUILDING_TO_WRITE),
    ),
    _call(
        method="POST",
        path=_GROUP + "/members",
        endpoint=members.join_group,
        summary="Join a group, or join again",
        description="Waits until all members have joined, and returns the partitions that this one "
        "reads. A new member gives no `member_id`; it is dropped `session_timeout_ms` after its "
        "last heartbeat, or if it does not join again within `rebalance_timeout_ms` of another's "
        "coming or going, and reads nothing until it has. Kafka's consumers may be in the same "
        "group, with the assignor `range`, `roundrobin` or `cooperative-sticky`.",
        body={
            JSON: Body(
                schema=members.JoinRequest,
                example={"topics": ["flights"], "session_timeout_ms": 10000},
            )
        },
        response={JSON: Body(schema=schemas.Membership)},
        problems=("group-refused", *_REBUILDING_TO_WRITE),
    ),
    _call(
        method="POST",
        path=_GROUP + "/members/{member}/heartbeat",
        endpoint=members.heartbeat,
        summary="Stay in a group",
        description="With the `reason` REBALANCE_IN_PROGRESS, commit what was read and join again "
        "with the same `member_id`; with ILLEGAL_GENERATION join again; with UNKNOWN_MEMBER_ID "
        "join without it.",
        body={JSON: Body(schema=members.HeartbeatRequest, example={"generation": 1})},
        status=204,
        problems=("group-refused", *_REBUILDING_TO_WRITE),
    ),
    _call(
        method="DELETE",
        path=_GROUP + "/members/{member}",
        endpoint=members.leave_group,
        summary="Leave a group",
        status=204,
        problems=("group-refused", *_REBUILDING_TO_WRITE),
    ),
    _call(
        method="GET",
        path=_GROUP,
        endpoint=handlers.get_group,
        summary="A group's offsets, lag and members",
        description="With `stable`, 503 `concurrent-transactions` while a transaction in progress "
        "has offsets of the group: who reads on from them would repeat what it did.",
        query=handlers.GroupQuery,
        response={JSON: Body(schema=schemas.GroupState)},
        problems=("unknown-group", "concurrent-transactions", *_REBUILDING),
    ),
    _call(
        method="DELETE",
        path=_GROUP,
        endpoint=handlers.delete_group,
        summary="Delete a group that nobody is in, with its offsets",
        status=204,
        problems=("unknown-group", "group-refused", *_REBUILDING_TO_WRITE),
    ),
    _call(
        method="GET",
        path="/v1/groups",
        endpoint=handlers.list_groups,
        summary="List groups by name",
        response={JSON: Body(schema=schemas.GroupList)},
        problems=_REBUILDING,
    ),
)

_PRODUCER_EXAMPLE: Final = {"producer_id": 3543849216634336, "producer_epoch": 4}
TRANSACTION_CALLS: Final = (
    _transaction_call(
        method="POST",
        path="/v1/transactions",
        endpoint=transactions.begin_transactions,
        summary="Begin with a transactional id (Kafka's InitProducerId)",
        description="Fences the producer that used the id before, and aborts what it left; waits "
        "until that is done. A transaction begins with the first produce that has the id in "
        "`Transactional-Id`, or with offsets, and is aborted by the broker `timeout_ms` later. "
        "Sequences begin with 0 in each partition and transaction.",
        body={
            JSON: Body(schema=transactions.TransactionToBegin, example={"transactional_id": "etl"})
        },
        status=201,
        response={JSON: Body(schema=schemas.TransactionalProducer)},
        response_headers={"Location": "the transactional id's path"},
        problems=("concurrent-transactions", *_REBUILDING_TO_WRITE),
    ),
    _transaction_call(
        method="GET",
        path="/v1/transactions",
        endpoint=transactions.list_transactions,
        summary="List transactional ids by name",
        query=transactions.ListTransactionsQuery,
        response={JSON: Body(schema=schemas.TransactionList)},
        problems=_REBUILDING,
    ),
    _transaction_call(
        method="GET",
        path=_TRANSACTION,
        endpoint=transactions.get_transaction,
        summary="A transactional id's producer, and its last transaction",
        response={JSON: Body(schema=schemas.TransactionState)},
        problems=("unknown-transaction", *_REBUILDING),
    ),
    _transaction_call(
        method="POST",
        path=_TRANSACTION + "/offsets",
        endpoint=transactions.commit_in_transaction,
        summary="Commit a group's offsets with the transaction",
        description="They count once the transaction is committed. Needs a token with the scope "
        "`read` as well.",
        body={
            JSON: Body(
                schema=transactions.TransactionOffsets,
                example={
                    **_PRODUCER_EXAMPLE,
                    "group": "etl",
                    "offsets": [{"topic": "flights", "partition": 0, "offset": 1000}],
                },
            )
        },
        status=204,
        problems=(
            *NO_PARTITION,
            "group-refused",
            "producer-fenced",
            "transaction-refused",
            "concurrent-transactions",
            *_REBUILDING_TO_WRITE,
        ),
    ),
    *(
        _transaction_call(
            method="POST",
            path=f"{_TRANSACTION}/{verb}",
            endpoint=endpoint,
            summary=summary,
            description="Returns once readers of committed records see it, with the producer of "
            "the next transaction, whose epoch is higher. The same call again gets the same "
            "response." + more,
            body={JSON: Body(schema=schema, example=_PRODUCER_EXAMPLE)},
            response={JSON: Body(schema=schemas.TransactionalProducer)},
            problems=(
                "producer-fenced",
                "transaction-refused",
                "concurrent-transactions",
                *_REBUILDING_TO_WRITE,
            ),
        )
        for verb, endpoint, schema, summary, more in (
            (
                "commit",
                transactions.commit_transaction,
                transactions.TransactionToCommit,
                "Commit the transaction",
                " `producer-fenced`: it was aborted, since it took too long or another producer "
                "began with the id. With `together` the transactions of several ids are committed "
                "by one decision, all or none: those of one job's tasks.",
            ),
            (
                "abort",
                transactions.abort_transaction,
                transactions.TransactionToEnd,
                "Abort the transaction",
                "",
            ),
        )
    ),
)
