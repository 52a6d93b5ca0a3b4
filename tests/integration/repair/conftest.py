"""The fixtures of the broker's tests."""

from tests.integration.broker.conftest import fast_rounds, harness

__all__ = ["fast_rounds", "harness"]
