"""The fixtures of the broker's tests."""

from tests.integration.broker.conftest import fast_store_checks, harness

__all__ = ["fast_store_checks", "harness"]
