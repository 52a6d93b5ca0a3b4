"""What a broker's process writes to stderr, to a pipe and to a terminal."""

import json
import os
import pty
import subprocess
import sys

PROGRAM = """
import logging, structlog
from tierlog.cli.logs import configure_logs
configure_logs()
logging.getLogger("uvicorn.error").warning("Invalid %s", "request")
def fail(token):
    raise ValueError("a bug")
for log in (structlog.get_logger(), logging.getLogger("asyncio")):
    try:
        fail("se" + "cret")
    except ValueError:
        log.exception("failed")
"""


def test_every_line_is_json_and_tracebacks_show_no_variables():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    warning, ours, theirs = map(json.loads, run.stderr.splitlines())
    assert (warning["event"], warning["level"]) == ("Invalid request", "warning")
    assert warning["logger"] == "uvicorn.error"
    for line in (ours, theirs):
        (error,) = line["exception"]
        assert (error["exc_type"], error["exc_value"]) == ("ValueError", "a bug")
        assert [frame["name"] for frame in error["frames"]] == ["<module>", "fail"]
    assert "secret" not in run.stderr


def shown_on_a_terminal(program: str = PROGRAM, **environment: str) -> bytes:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", program]
    subprocess.run(command, stderr=theirs, check=True, env={**os.environ, **environment})
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # on Linux: the other side is closed
        pass
    os.close(ours)
    return shown


def test_tracebacks_on_a_terminal_show_no_variables():
    shown = shown_on_a_terminal(NO_COLOR="")
    assert shown.count(b"ValueError: a bug") == 2
    assert b"secret" not in shown
    assert b"\x1b[" in shown
    assert b"\x1b[" not in shown_on_a_terminal(NO_COLOR="1")


def test_text_that_a_client_chose_has_no_control_characters_on_a_terminal():
    title = "\x1b]2;title\x07"  # renames the window
    shown = shown_on_a_terminal(
        f"from tierlog.cli.logs import configure_logs; configure_logs(); import logging, structlog;"
        f"structlog.get_logger().error('request failed', group={title!r});"
        f"logging.getLogger('uvicorn.error').warning({title!r})"
    )
    assert b"title" in shown
    assert b"\x1b]" not in shown
