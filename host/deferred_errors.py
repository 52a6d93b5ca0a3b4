"""Loops in which a step that fails does not keep the following ones from being tried.

deferred = DeferredErrors(ConfigurationError)
for step in steps:
    with deferred:
        step()
deferred.raise_first()
"""

from __future__ import annotations

from types import TracebackType


class DeferredErrors:
    """Keeps the first error of the given kinds. One thread at a time."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds
        self._first: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, self._kinds):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        """Raise the first error, if there was one."""
        if self._first is not None:
            raise self._first
