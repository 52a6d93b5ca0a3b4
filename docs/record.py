"""Record the terminal of the first minutes as docs/pictures/terminal.svg: `make recording`.

A real run: a broker of its own in a temporary folder, each command on a terminal of 116 columns. So
what differs from run to run (ids, times) differs in the picture, too.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 116
PICTURE = Path(__file__).parent / "pictures" / "terminal.svg"
COMMANDS = (
    "tierlog topic create clicks --config segment.bytes=65536 --config local.retention.bytes=65536",
    "seq 1 20000 | sed 's/.*/user-&,clicked on page &/' | tierlog produce clicks --key-separator ,",
    "tierlog storage offload clicks",
    "tierlog topic describe clicks",
    "tierlog storage segments clicks",
    "tierlog consume clicks --offset 19998 --format json",
)
# rich's own, without the web font that it would fetch.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>tierlog in a terminal</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> int:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        broker = subprocess.Popen(
            [sys.executable, "-m", "tierlog", "dev", "--port", "0"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            server = _server(broker)
            for command in COMMANDS:
                console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
                console.print(Text.from_ansi(_run(command, folder, server)), end="")
        finally:
            broker.terminate()
            broker.wait(60)
    svg = console.export_svg(
        title="tierlog", theme=MONOKAI, code_format=FORMAT, unique_id="terminal"
    )
    PICTURE.write_text(svg)
    return 0


def _server(broker: subprocess.Popen[str]) -> str:
    assert broker.stdout is not None
    for line in broker.stdout:
        if found := re.search(r"listens on (http://[^\s,]+)", line):
            return found[1]
    raise RuntimeError("the broker did not start")


def _run(command: str, folder: str, server: str) -> str:
    """What it shows on a terminal."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(  # noqa: S603
        ["bash", "-c", command],  # noqa: S607
        cwd=folder,
        env=os.environ | size | {"TIERLOG_SERVER": server, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # EIO: nobody writes any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    if process.wait() != 0:
        raise RuntimeError(f"{command}: {shown.decode()}")
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)  # of a progress bar the end


if __name__ == "__main__":
    sys.exit(main())
