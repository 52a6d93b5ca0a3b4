"""Processes started by `tierlog demo` end with it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierlog.cli import demo
from tierlog.cli.demo_processes import ChildProcess


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    """The demo ignores signals while it ends; a child that inherited this would outlive SIGTERM."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def started(folder: Path) -> ChildProcess:
    code = ["-c", "import signal; signal.pause()"]
    return ChildProcess("child", code, folder=folder, environment=os.environ)


def interrupted() -> bool:
    raise KeyboardInterrupt


def test_a_process_whose_start_was_interrupted_is_stopped(tmp_path: Path) -> None:
    child = started(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        child.wait_until(interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_second_interrupt_leaves_no_process_running(tmp_path: Path) -> None:
    stage = demo.Stage(tmp_path, {}, s3_server=started(tmp_path))
    stage.spark = SimpleNamespace(stop=lambda: signal.raise_signal(signal.SIGINT))
    try:
        demo._stop_all(stage)
        with pytest.raises(ProcessLookupError):
            os.kill(stage.s3_server.pid, 0)
    finally:
        stage.s3_server.stop()


def test_processes_are_stopped_even_if_sparks_jvm_is_gone(tmp_path: Path) -> None:
    def fail() -> None:
        raise ConnectionRefusedError

    stage = demo.Stage(tmp_path, {}, broker=started(tmp_path), s3_server=started(tmp_path))
    stage.spark = SimpleNamespace(stop=fail)
    children = [stage.broker, stage.s3_server]
    try:
        with pytest.raises(ConnectionRefusedError):
            demo._stop_all(stage)
        for child in children:
            with pytest.raises(ProcessLookupError):
                os.kill(child.pid, 0)
    finally:
        for child in children:
            child.stop()
