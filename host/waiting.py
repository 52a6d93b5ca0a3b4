"""Whether a call may wait: for the disk, the store, or a lock that is held meanwhile.

A thread waits; the event loop never does. Both make the same calls: with NEVER, whatever would have
to wait raises WouldBlock, and the call is repeated in a thread.
"""

from __future__ import annotations

import errno
from enum import Enum


class WouldBlock(BlockingIOError):
    """The caller never waits, and would have to."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EAGAIN, reason)


class Wait(Enum):
    WAIT = "wait"
    NEVER = "never"

    def before(self, step: str) -> None:
        """Call before a step that waits. Raises WouldBlock if the caller never does."""
        if self is Wait.NEVER:
            raise WouldBlock(step)
