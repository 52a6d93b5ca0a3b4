"""Calls on the state of share partitions, which any broker of the cluster may keep.

* Those for one partition of the state's log go in order, and each once those before it were
  answered: at once, if it is here and none waits; else all that wait in one call, from a thread.
* While that partition is moved, or its broker is down, they are tried again for PATIENCE_S. All may
  be repeated: a state that is written twice is the same, and what is late counts no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from tierlog.broker.membership.gathered_calls import GatheredCalls
from tierlog.broker.membership.peers import Peers
from tierlog.broker.topics.coordinator_log import CoordinatorLog, home_number
from tierlog.host.threads import Threads, failed
from tierlog.record_format.errors import (
    WILL_PASS,
    FencedError,
    GroupRefused,
    LeaderUnknown,
    NotLeader,
    PeerUnavailable,
    ShuttingDown,
    Starting,
    TierlogError,
)
from tierlog.record_format.share_state import ShareState, StateAnswer, StateCall

THREADS_MAX: Final = 16
CALLS_MAX: Final = 500  # in one
PATIENCE_S: Final = 5.0
ASK_AGAIN_S: Final = 0.1
ANSWER_TIMEOUT_S: Final = 4.0
NONE: Final = "NONE"
MOVED: Final = "NOT_COORDINATOR"


class ShareStatePeers:
    """Thread-safe. `carry_out`: of the coordinator here. `close` ends its threads."""

    def __init__(
        self,
        peers: Peers,
        log: CoordinatorLog,
        carry_out: Callable[[StateCall], Future[ShareState]],
    ) -> None:
        self._peers, self._log, self._carry_out = peers, log, carry_out
        self._threads = Threads(THREADS_MAX, name="share-states")
        self._calls: GatheredCalls[int, StateCall, ShareState] = GatheredCalls(
            self._send, threads=self._threads, most=CALLS_MAX
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, call: StateCall) -> Future[ShareState]:
        """Does not wait. The future raises GroupRefused, Throttled, LeaderUnknown, what an append
        raises.
        """
        topic = self._log.topic
        if topic is None:
            return failed(Starting(f"there is no {self._log.name} yet"))
        number = home_number(call.key.home, topic)
        return self._calls.give(number, call, at_once=partial(self._answer_here, call))

    def _answer_here(self, call: StateCall) -> Future[ShareState] | None:
        try:
            self._log.check_ready(call.key.home)
        except TierlogError:
            return None
        answer = self._carry_out(call)
        return None if answer.done() and isinstance(answer.exception(), WILL_PASS) else answer

    def _send(self, _: int, calls: Sequence[StateCall]) -> list[ShareState | TierlogError]:
        """Calls for one partition. Raises what keeps its broker from answering, in the end."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return [_outcome(answer) for answer in self._try_send(calls)]
            except (LeaderUnknown, Starting, PeerUnavailable):
                if time.monotonic() >= until_s:
                    raise
            time.sleep(ASK_AGAIN_S)

    def _try_send(self, calls: Sequence[StateCall]) -> list[StateAnswer]:
        """Raises LeaderUnknown, Starting, PeerUnavailable: it may be tried again."""
        home = calls[0].key.home
        try:
            self._log.load_home(home)
            self._log.check_ready(home)
            answers = answer_all(self._carry_out, calls)
        except NotLeader as elsewhere:
            answers = self._peers.ask_share_states(elsewhere.url, calls)
            if len(answers) != len(calls):
                raise PeerUnavailable(f"{elsewhere.url}: {len(answers)} answers") from elsewhere
        if any(one.reason == MOVED for one in answers):
            raise LeaderUnknown("the share groups' state is being moved", retry_after_s=1)
        return answers


def answer_all(
    carry_out: Callable[[StateCall], Future[ShareState]], calls: Sequence[StateCall]
) -> list[StateAnswer]:
    """Waits for the log."""
    return [_answer(one) for one in list(map(carry_out, calls))]


def _answer(carried_out: Future[ShareState]) -> StateAnswer:
    try:
        return StateAnswer(state=carried_out.result(ANSWER_TIMEOUT_S))
    except GroupRefused as refused:
        return StateAnswer(reason=refused.reason, detail=str(refused))
    except (*WILL_PASS, FencedError, ShuttingDown) as error:
        return StateAnswer(reason=MOVED, detail=str(error))
    except (TierlogError, OSError, TimeoutError) as error:
        return StateAnswer(reason="COORDINATOR_NOT_AVAILABLE", detail=str(error))


def _outcome(answer: StateAnswer) -> ShareState | TierlogError:
    if answer.state is not None:
        return answer.state
    return GroupRefused(answer.reason, answer.detail)
