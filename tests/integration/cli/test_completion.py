"""What a shell offers after Tab: the broker's names, and nothing if it cannot be asked."""

import socket

import pytest

from tests.fakes.command_line import Program, RunningBroker


def completed(server: str, line: str) -> list[str]:
    program = Program(server)
    program.environment |= {
        "_TIERLOG_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }
    return program.ok().decode().split()


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    broker = RunningBroker("dev", "--port", "0", cwd=tmp_path_factory.mktemp("completion"))
    program = Program(broker.server)
    for topic in ("orders", "orders-eu", "payments"):
        program.ok("topic", "create", topic)
    program.ok("group", "set", "billing", "orders:0=0")
    program.ok("group", "set", "bad\nname", "orders:0=0")
    yield broker
    broker.stop()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tierlog consume or", ["orders", "orders-eu"]),
        ("tierlog topic describe pay", ["payments"]),
        ("tierlog topic create pay", []),
        ("tierlog storage segments --partition 0 orders-", ["orders-eu"]),
        ("tierlog group describe b", ["billing"]),
        ("tierlog consume orders --group b", ["billing"]),
    ],
)
def test_names_come_from_the_broker(broker, line, offered):
    assert completed(broker.server, line) == offered


def test_the_command_lines_broker_is_asked(broker):
    line = f"tierlog consume --server {broker.server} pay"
    assert completed("http://127.0.0.1:1", line) == ["payments"]


def test_without_a_broker_nothing_is_offered():
    with socket.socket() as sock:  # bound, but not listening
        sock.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert completed(server, "tierlog consume or") == []
        assert completed("ftp://wrong", "tierlog consume or") == []
