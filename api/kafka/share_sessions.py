"""Share sessions (KIP-932): which partitions a member of a share group reads here, kept between its
requests.

* A session is of one member and one connection. When either ends, what the member has is given up;
  with a group's last one, its share partitions are closed.
* The epoch of each request is one more than that of the one before; 0 begins a session, -1 ends it.
* There are at most `group.share.max.share.sessions`.

Used on the event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from tierlog.api.kafka.calls import Session
from tierlog.api.kafka.error_codes import Code, Refused

FIRST_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_MAX_EPOCH: Final = 2**31 - 1

Place = tuple[bytes, int]
"""A topic's id, and a partition of it."""


class ShareSession:
    """`places`: whether the member is still to be told of it. `epoch`: of the next request."""

    def __init__(self, group: str, member: str, connection: Session) -> None:
        self.group, self.member, self.connection = group, member, connection
        self.places: dict[Place, bool] = {}
        self.epoch = 1

    def update(self, added: Iterable[Place], forgotten: Iterable[Place]) -> None:
        for place in added:
            self.places.setdefault(place, True)
        for place in forgotten:
            self.places.pop(place, None)

    def next_epoch(self) -> None:
        self.epoch = self.epoch + 1 if self.epoch < _MAX_EPOCH else 1


class ShareSessions:
    """`release` gives up all that a member has of these partitions; `close_group`: nobody of the
    group reads here.
    """

    def __init__(
        self,
        sessions_max: int,
        *,
        release: Callable[[str, str, Iterable[Place]], None],
        close_group: Callable[[str], None],
    ) -> None:
        self._max, self._release, self._close_group = sessions_max, release, close_group
        self._counts: Counter[str] = Counter()  # by group
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self, group: str, member: str, epoch: int, connection: Session
    ) -> tuple[ShareSession, bool]:
        """The session of a ShareFetch, and whether it is a new one. Raises Refused."""
        if epoch != FIRST_EPOCH:
            return self.go_on(group, member, epoch), False
        self.end(group, member)
        if len(self._sessions) >= self._max:
            raise Refused(Code.SHARE_SESSION_LIMIT_REACHED)
        session = ShareSession(group, member, connection)
        self._sessions[group, member] = session
        self._counts[group] += 1
        connection.on_close.append(lambda: self._ended(session))
        return session, True

    def go_on(self, group: str, member: str, epoch: int) -> ShareSession:
        """Raises Refused."""
        if epoch == FIRST_EPOCH:
            raise Refused(Code.INVALID_SHARE_SESSION_EPOCH)
        session = self._sessions.get((group, member))
        if session is None:
            raise Refused(Code.SHARE_SESSION_NOT_FOUND)
        if epoch != FINAL_EPOCH:
            if epoch != session.epoch:
                raise Refused(Code.INVALID_SHARE_SESSION_EPOCH)
            session.next_epoch()
        return session

    def end(self, group: str, member: str) -> None:
        session = self._sessions.get((group, member))
        if session is not None:
            self._ended(session)

    def _ended(self, session: ShareSession) -> None:
        name = session.group, session.member
        if self._sessions.get(name) is session:
            del self._sessions[name]
            self._release(*name, session.places)
            self._counts[session.group] -= 1
            if not self._counts[session.group]:
                del self._counts[session.group]
                self._close_group(session.group)
