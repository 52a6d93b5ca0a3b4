"""Shell completion: names from the broker, and nothing if it cannot be reached."""

import socket

import pytest

from tests.fakes.command_line import Program, RunningBroker


def complete(server: str, line: str) -> list[str]:
    program = Program(server)
    program.environment |= {
        "_TIERLOG_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }
    return program.ok().decode().split()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    broker = RunningBroker(
        "dev", "--listen", "127.0.0.1:0", cwd=tmp_path_factory.mktemp("completion")
    )
    program = Program(broker.server)
    for topic in ("orders", "orders-eu", "payments"):
        program.ok("topic", "create", topic)
    program.ok("group", "set", "billing", "orders:0=0")
    program.ok("group", "set", "bad\nname", "orders:0=0")
    yield broker
    broker.stop()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tierlog consume or", ["orders", "orders-eu"]),
        ("tierlog topic describe pay", ["payments"]),
        ("tierlog topic create pay", []),
        ("tierlog storage segments --partition 0 orders-", ["orders-eu"]),
        ("tierlog group describe b", ["billing"]),
        ("tierlog consume orders --group b", ["billing"]),
    ],
)
def test_topics_and_groups_are_completed_from_the_broker(broker, line, expected):
    assert complete(broker.server, line) == expected


def test_completion_uses_the_server_option(broker):
    line = f"tierlog consume --server {broker.server} pay"
    assert complete("http://127.0.0.1:1", line) == ["payments"]


def test_nothing_is_completed_without_a_broker():
    with socket.socket() as sock:  # bound, but not listening
        sock.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert complete(server, "tierlog consume or") == []
        assert complete("ftp://wrong", "tierlog consume or") == []
