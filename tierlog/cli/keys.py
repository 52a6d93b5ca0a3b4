"""The keys that a person presses, one at a time, without waiting for a line.

The terminal's settings are restored at the end; Ctrl-C stays a signal.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

Keys = Callable[[float], list[str]]

# Arrows are three characters; a lone escape is the key.
_KEY: Final = re.compile(r"\x1b[\[O][A-Za-z]|.", re.DOTALL)
_NAMES: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
}


@contextmanager
def pressed_keys() -> Iterator[Keys]:
    """Yields a function that waits for keys, at most so many seconds: their characters, or names
    such as `up`. Standard input must be a terminal.
    """
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    poll = select.poll()
    poll.register(source, select.POLLIN)

    def wait(timeout_s: float) -> list[str]:
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return []
        text = os.read(source, 1024).decode(errors="ignore")
        return [_NAMES.get(key, key) for key in _KEY.findall(text)] if text else ["q"]  # its end

    tty.setcbreak(source)
    try:
        yield wait
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
