"""A consumer as a member of its group: when it joins, how it stays, and what its commits carry.

* No I/O, and no clock: the drivers (`Client`, `AsyncClient`) run the steps. `stay` runs every
  `heartbeat_interval_ms` in the background, perhaps in another thread; all else between records.
* An answer is about the membership (id and generation) for which it was asked, and changes nothing
  about a later one.
* Whatever the group refuses, the member joins again, which raises what cannot be mended so: that
  another process has its `instance_id`, say.
* As long as the loop over the records holds one for no longer than `max_poll_interval_ms`, the
  member stays. Else it leaves, as the group would wait for it at the next rebalance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from tierlog.client.exchange import NO_RETRIES, Call, RetryPolicy, Steps, exchange
from tierlog.client.responses import AssignedTopic, json_reader, no_content
from tierlog.client.wire import Request, Subject, json_request, path_segment
from tierlog.record_format.errors import GroupRefused, InvalidRequest, TierlogError

log = logging.getLogger(__name__)


class Membership(NamedTuple):
    """How a consumer is in its group: Kafka's settings, and its defaults.

    The group gives its partitions to others `session_timeout_ms` after its last heartbeat, or if
    the loop over its records has not asked for the next one for `max_poll_interval_ms`. With an
    `instance_id` (Kafka's static membership) it does not leave when it ends, and has the same
    partitions if it is back within its session.
    """

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    instance_id: str | None = None
    client_id: str = "tierlog"

    @property
    def heartbeat_interval_s(self) -> float:
        return self.heartbeat_interval_ms / 1000

    def check(self) -> None:
        """Raises InvalidRequest."""
        if not 0 < self.heartbeat_interval_ms < self.session_timeout_ms:
            raise InvalidRequest(
                "heartbeat_interval_ms must be more than 0 and less than session_timeout_ms"
            )


DEFAULT_MEMBERSHIP: Final = Membership()


class Identity(NamedTuple):
    """Who commits: a member, in a generation of its group; by default nobody in particular."""

    member_id: str = ""
    generation: int = -1


NOBODY: Final = Identity()


class _Joined(msgspec.Struct, frozen=True, kw_only=True):
    member_id: str
    generation: int
    assignment: tuple[AssignedTopic, ...]


class Member:
    """`identity`: as which it commits."""

    def __init__(self, group: str, topic: str, settings: Membership) -> None:
        settings.check()
        self.settings = settings
        self.identity = NOBODY
        self._group, self._topic = group, topic
        self._refused: Identity | None = None
        self._is_joining = False
        self._handed_out_s: float | None = None

    @property
    def must_join(self) -> bool:
        return self.identity in (NOBODY, self._refused)

    def forget(self) -> None:
        """It is not this process that is in the group."""
        self.identity = NOBODY

    def hand_out(self, now_s: float) -> None:
        """The loop over the records has one, until `take_back`."""
        self._handed_out_s = now_s

    def take_back(self) -> None:
        self._handed_out_s = None

    def refuse(self, refused: GroupRefused, identity: Identity) -> None:
        """The group refused a call of this membership."""
        log.debug("group %s: %s refused: %s", self._group, identity.member_id, refused)
        self._refused = identity

    def join(self, policy: RetryPolicy) -> Steps[Sequence[int]]:
        """Join, or join again, and return the partitions to read. It waits until all other members
        have joined again, for as long as one of them may take for a record.

        Raises GroupRefused.
        """
        self._is_joining = True
        try:
            joined = yield from self._join(policy)
        finally:
            self._is_joining = False
        self._refused = None
        self.identity = Identity(joined.member_id, joined.generation)
        mine = (one.partitions for one in joined.assignment if one.topic == self._topic)
        return next(mine, ())

    def _join(self, policy: RetryPolicy) -> Steps[_Joined]:
        while True:
            try:
                return (yield from exchange(self._join_call(), policy))
            except GroupRefused as refused:
                if refused.reason != "UNKNOWN_MEMBER_ID" or self.identity == NOBODY:
                    raise
                self.identity = NOBODY  # its session is over: as a new member

    def stay(self, now_s: float) -> Steps[None]:
        """Send a heartbeat; or leave, if the loop over the records is too slow."""
        identity = self.identity
        if self._is_joining or self.must_join:
            return
        call: Call[None] | None = self._heartbeat(identity)
        if self._is_too_slow(now_s):
            self._refused, call = identity, self._leave_call(identity)
        if call is None:
            return
        try:
            yield from exchange(call, NO_RETRIES)
        except GroupRefused as refused:
            self.refuse(refused, identity)
        except TierlogError as error:
            log.debug("group %s: no heartbeat: %s", self._group, error)

    def _is_too_slow(self, now_s: float) -> bool:
        since_s, limit_ms = self._handed_out_s, self.settings.max_poll_interval_ms
        if since_s is None or (now_s - since_s) * 1000 < limit_ms:
            return False
        log.warning(
            "group %s: a record of %s is being handled for more than max_poll_interval_ms=%s: "
            "leaving the group, others read it again",
            *(self._group, self._topic, limit_ms),
        )
        return True

    def leave(self) -> Call[None] | None:
        """Once; None if there is nothing to leave."""
        identity, self.identity = self.identity, NOBODY
        return self._leave_call(identity)

    # --- calls ------------------------------------------------------------------------------------

    def _join_call(self) -> Call[_Joined]:
        settings = self.settings
        fields: dict[str, Any] = {
            "topics": [self._topic],
            "member_id": self.identity.member_id,
            "client_id": settings.client_id,
            "session_timeout_ms": settings.session_timeout_ms,
            "rebalance_timeout_ms": settings.max_poll_interval_ms,
        }
        if settings.instance_id is not None:
            fields["instance_id"] = settings.instance_id
        subject = Subject(self._topic)
        request = json_request("POST", f"{group_path(self._group)}/members", fields, subject)
        request = request._replace(extra_wait_s=settings.max_poll_interval_ms / 1000)
        return Call(request, json_reader(_Joined))

    def _heartbeat(self, identity: Identity) -> Call[None]:
        fields: dict[str, Any] = {"generation": identity.generation}
        if self.settings.instance_id is not None:
            fields["instance_id"] = self.settings.instance_id
        path = f"{self._member_path(identity)}/heartbeat"
        return Call(json_request("POST", path, fields, Subject()), no_content)

    def _leave_call(self, identity: Identity) -> Call[None] | None:
        if identity == NOBODY or self.settings.instance_id is not None:
            return None
        return Call(Request("DELETE", self._member_path(identity)), no_content, once=True)

    def _member_path(self, identity: Identity) -> str:
        return f"{group_path(self._group)}/members/{quote(identity.member_id, safe='')}"


def group_path(name: str) -> str:
    return "/v1/groups/" + path_segment(name, what="a group's name")
