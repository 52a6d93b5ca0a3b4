"""One broker per module, and the program as its client."""

import pytest

from tests.fakes.command_line import Program, RunningBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """`tierlog dev` on a free port."""
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
