"""One broker for a module's tests, and the program that speaks to it."""

import pytest

from tests.fakes.command_line import Program, RunningBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """`tierlog dev` on any port."""
    folder = tmp_path_factory.mktemp("dev")
    running = RunningBroker("dev", "--port", "0", cwd=folder)
    running.folder = folder
    yield running
    assert running.stop() == 0


@pytest.fixture
def tierlog(broker):
    return Program(broker.server)


@pytest.fixture
def offline():
    return Program()
