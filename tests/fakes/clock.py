"""A clock that a test sets."""

NOW_MS = 1_700_000_000_000


class Clock:
    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms
