"""The entry point of `tierlog`.

The program is imported when it is called: Ctrl-C while its modules load ends it like any other.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the program. Never returns."""
    try:
        from tierlog.cli.program import main as run_program

        run_program()
    except KeyboardInterrupt:
        sys.exit(130)  # the INTERRUPTED of the program, which may not be loaded


if __name__ == "__main__":
    main()
