"""The program `tierlog`: finds a command, runs it, and turns its failure into an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage or settings, 3 a verification found problems, 130
interrupted by Ctrl-C. SIGTERM interrupts a command, too, and ends the process in the end, so that a
shell reports 143, and systemd a clean stop.

* A failure that a user can cause is one line on stderr. A traceback is a bug in tierlog.
* A command's module is imported when the command is called: `tierlog --help` and the completion of
  its name import none of them, nor rich, pydantic or msgspec.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType, MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tierlog.cli.help import format_help
from tierlog.cli.output import printable
from tierlog.extras import how_to_install
from tierlog.record_format.errors import (
    OutcomeUnknownError,
    SettingsError,
    TierlogError,
    did_you_mean,
)

# click's class, or that of the copy of click inside newer versions of typer.
UsageError: Final[Any] = typer.BadParameter.__mro__[1]
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it


class Entry(NamedTuple):
    """A command's module, its line in the list of commands, and the extra that it requires."""

    module: str
    summary: str
    panel: str
    extra: str = ""


COMMANDS: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "dev": Entry("serve", "Run a broker with an embedded store; no flags needed.", "Broker"),
        "serve": Entry("serve", "Run a broker on a data folder and a bucket.", "Broker"),
        "demo": Entry(
            "demo",
            "Send real data through both tiers, and read it with Spark.",
            "Broker",
            "demo",
        ),
        "topic": Entry(
            "topic", "Create, list, describe, alter and delete topics.", "Topics and records"
        ),
        "produce": Entry(
            "produce", "Append lines, JSON, CSV, Parquet or record batches.", "Topics and records"
        ),
        "consume": Entry("consume", "Print records from both tiers.", "Topics and records"),
        "group": Entry(
            "group", "Show, set and delete the offsets of groups.", "Topics and records"
        ),
        "transaction": Entry("transaction", "Show and abort transactions.", "Topics and records"),
        "storage": Entry("storage", "Inspect, verify and repair both tiers.", "Storage"),
        "cluster": Entry(
            "cluster", "Show the brokers of a cluster, and move what they lead.", "Broker"
        ),
        "bench": Entry("bench", "Measure a broker's produce and fetch rates.", "Broker"),
        "top": Entry("top", "Show what a broker is doing right now.", "Broker"),
        "sql": Entry("sql", "Query topics as tables, without Spark.", "Topics and records", "sql"),
        "table": Entry(
            "table",
            "Keep topics as Iceberg tables, without Spark.",
            "Topics and records",
            "iceberg",
        ),
        "replay": Entry(
            "on_spark",
            "Copy a topic's records to Parquet, JSON or another topic.",
            "On Spark",
            "spark",
        ),
        "stats": Entry(
            "on_spark", "Count records, bytes, keys and sizes by hour.", "On Spark", "spark"
        ),
        "spark-zip": Entry(
            "on_spark", "Write tierlog's code as one zip, for executors.", "On Spark"
        ),
        "dump": Entry("dump", "Print or verify a log's files, as kafka-dump-log does.", "Storage"),
        "token": Entry(
            "token", "Create, list and revoke the tokens that a broker accepts.", "Broker"
        ),
        "doctor": Entry("doctor", "Check this machine for what tierlog requires.", "Broker"),
    }
)


class Commands(TyperGroup):
    """The top-level group: imports only the command that is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """A placeholder with the summary: for help and completion."""
        if (entry := COMMANDS.get(cmd_name)) is None:
            return None
        command = TyperCommand(cmd_name, short_help=entry.summary, help=entry.summary)
        command.rich_help_panel = entry.panel
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called. Raises a usage error with the nearest name."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = did_you_mean(args[0], COMMANDS)
            raise UsageError(f"no such command: {args[0]!r}{near}", ctx=ctx)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(args[0]), rest


def load_command(name: str) -> Any:
    """Import a command, a function with its name, or a group, the `app` of its module."""
    module = import_module(f"tierlog.cli.{COMMANDS[name].module}")
    if (app := getattr(module, "app", None)) is None:
        app = typer.Typer(add_completion=False)
        app.command()(getattr(module, name.replace("-", "_")))
    command = typer.main.get_command(app)
    command.name, command.help = name, command.help or COMMANDS[name].summary
    _prepare_help(command)
    return command


def _prepare_help(command: Any) -> None:
    command.format_help = partial(format_help, command)
    for part in getattr(command, "commands", {}).values():
        _prepare_help(part)


app = typer.Typer(
    cls=Commands,
    name="tierlog",
    help="A tiered log store: new records on local disk, sealed segments in your bucket.",
    epilog="Clients use --server or TIERLOG_SERVER. See also tierlog COMMAND --help.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from tierlog import __version__

        typer.echo(f"tierlog {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """The program. Never returns."""
    if sys.platform == "win32":
        fail(
            "tierlog does not run on Windows: it needs POSIX files and sockets. "
            "WSL 2 runs it as Linux does"
        )
    terminated = False

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        """As Ctrl-C, which lets a command commit its offsets, or say what it appended. A second
        signal ends it at once: it may be waiting for the reader of its output.
        """
        nonlocal terminated
        terminated = True
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # brokers have handlers of their own
    _open_closed_standard_files()
    _buffer_output()
    _ignore_errors_of_stderr()
    try:
        code = run_command(sys.argv[1:])
    finally:
        _flush_or_discard_output()
    if terminated and code == INTERRUPTED:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the demo's cleanup ignores it
        signal.raise_signal(signal.SIGTERM)
        code = 128 + signal.SIGTERM  # the first process of a container survives its own signals
    sys.exit(code)


def _open_closed_standard_files() -> None:
    """Open the standard files that are closed, as in some cron jobs and daemons: otherwise the next
    file to be opened, perhaps a log's, gets the descriptor that is printed to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _buffer_output() -> None:
    """Also with PYTHONUNBUFFERED: what is written to a full disk, or to a pipe that does not block,
    may then be cut short without an error. What the encoding cannot represent is escaped.
    """
    encoding = sys.stdout.encoding
    sys.stdout = open(1, "w", encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115


class _LossyFile(io.FileIO):
    """What cannot be written is lost."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def _ignore_errors_of_stderr() -> None:
    """A broker's log stops nothing, and neither does an error message: the disk may be full, the
    reader of the pipe or the terminal gone.
    """
    stderr = io.BufferedWriter(_LossyFile(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(
        stderr, encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
    )


def run_command(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    command = typer.main.get_command(app)
    _prepare_help(command)
    try:
        code = command.main(arguments, prog_name="tierlog", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        return _usage(error)
    except (typer.Abort, KeyboardInterrupt) as error:
        return _interrupted(error)
    except BrokenPipeError:
        return _output_closed()
    except SystemExit as error:
        # Typer itself exits when a pipe breaks.
        if isinstance(error.__context__, BrokenPipeError):
            return _output_closed()
        raise
    except ModuleNotFoundError as error:
        entry = COMMANDS.get(arguments[0]) if arguments else None
        if (hint := how_to_install(error, extra=entry.extra if entry else "")) is None:
            raise
        return _print_error(hint)
    except OutcomeUnknownError as error:
        return _print_error(f"{error} (outcome unknown)")
    except SettingsError as error:
        _print_error(str(error))
        return 2
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 become lone surrogates
        _print_error(f"an argument is not valid text: {error.object}")
        return 2
    except (TierlogError, OSError) as error:
        return _print_error(_error_text(error))
    return code if isinstance(code, int) else 0


def _interrupted(error: BaseException) -> int:
    """Raises an EOFError of a command, which is a bug as any other exception: typer takes it for
    the end of a prompt's input.
    """
    if isinstance(error.__cause__, EOFError):
        raise error.__cause__ from None
    return INTERRUPTED


def _output_closed() -> int:
    """The reader of the pipe, such as `head`, has ended: not a failure."""
    _discard_output()
    return 0


def _flush_or_discard_output() -> bool:
    """Whether standard output could be written; not to a full disk, for example. What is left is
    then discarded: Python would write it at the end, and replace the exit code by 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return False
    return True


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def fail(text: str) -> NoReturn:
    """End the program with an error message."""
    sys.exit(_print_error(text))


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tierlog"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if context is not None and message == context.get_help():  # a group without a command
        typer.echo(message, err=True)
        return 2
    # Without the libraries' prefixes: what is refused is often not a value.
    message = message.replace("Value error, ", "").removeprefix("Invalid value: ").removesuffix(".")
    # Pydantic names only the limit: add the value.
    if (
        found := getattr(error.__cause__, "errors", None)
    ) is not None and "Input should" in message:
        message += f", not {found()[0]['input']!r}"
    _print_error(f"{message} (see {path} --help)")
    return 2


def _print_error(text: str) -> int:
    line = printable(" ".join(text.split()))  # it may quote untrusted text
    sys.stderr.write(f"tierlog: {line}\n")
    return 1


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = error.filename if _flush_or_discard_output() else "standard output"
        return f"{where}: {error.strerror}" if where else error.strerror
    return str(error) or type(error).__name__
