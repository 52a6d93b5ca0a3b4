"""How `--help` looks: sections of two columns, without a library that takes a while.

* Every option is in one section. Those of all clients are in one of their own, at the end.
* A placeholder says what to write, never a type of Python. A flag has none.
* Names of options are never broken; text is wrapped to the terminal's width, at most `WIDTH_MAX`.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, get_args

import typer

COMMON_OPTIONS: Final = "Common options"
WIDTH_MAX: Final = 100
_NAMES_MAX: Final = 26  # columns; a longer name has its text below
_UNCUT: Final = 1 << 10  # characters of a command's first sentence: it is wrapped
_PLACEHOLDERS: Final = {int: "N", float: "NUMBER", Path: "PATH"}

Row = tuple[str, str]


def format_help(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the help of a command, or of a group, to click's formatter."""
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX)
    formatter.write(f"{_heading('Usage')} {' '.join(_usage(command, ctx))}\n")
    for paragraph in (command.help or "").split("\n\n"):
        formatter.write("\n" + _wrapped(" ".join(paragraph.split()), width, indent="  "))
    for title, rows in _sections(command, ctx).items():
        formatter.write(f"\n{_heading(title)}\n" + "".join(_columns(rows, width)))
    if command.epilog:
        formatter.write("\n" + _wrapped(command.epilog, width))


def _usage(command: Any, ctx: Any) -> Iterator[str]:
    yield from (ctx.command_path, "[OPTIONS]")
    for one in command.params:
        if one.param_type_name == "argument":
            name = _names(one) + ("..." if one.nargs != 1 else "")
            yield name if one.required else f"[{name}]"
    if hasattr(command, "list_commands"):
        yield "COMMAND"


def _sections(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """The rows of each section. The common options are last, and `--help` is one where there are
    others.
    """
    sections: dict[str, list[Row]] = {}
    if (list_commands := getattr(command, "list_commands", None)) is not None:
        for name in list_commands(ctx):
            part = command.get_command(ctx, name)
            panel = getattr(part, "rich_help_panel", None) or "Commands"
            sections.setdefault(panel, []).append((name, part.get_short_help_str(_UNCUT)))
    shown = [one for one in command.get_params(ctx) if not one.hidden]
    panels = {one.name: _panel(one) for one in shown}
    if COMMON_OPTIONS in panels.values():
        panels["help"] = COMMON_OPTIONS
    for one in sorted(shown, key=lambda one: panels[one.name] == COMMON_OPTIONS):
        sections.setdefault(panels[one.name], []).append((_names(one), _text(one)))
    return sections


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(sorted(parameter.opts, key=lambda name: name.startswith("--")))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    return f"{names} {placeholder(parameter)}".rstrip()


def placeholder(option: Any) -> str:
    """What stands for an option's value: its own, its choices, or what its type is written like."""
    if getattr(option, "is_flag", False) or option.name == "help":
        return ""
    if option.metavar:
        return str(option.metavar)
    kind = option.type_descriptor.annotation
    kind = next((one for one in get_args(kind) if isinstance(one, type)), kind)
    if choices := _choices(kind):
        return "|".join(choices)
    return _PLACEHOLDERS.get(kind, "TEXT")


def _choices(kind: Any) -> Sequence[str]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(one.value) for one in kind]
    return [one for one in get_args(kind) if isinstance(one, str)]


def _text(parameter: Any) -> str:
    notes = []
    if (default := _default(parameter)) != "":
        notes.append(f"default {default}")
    if parameter.required and parameter.param_type_name == "option":
        notes.append("required")
    if parameter.envvar and parameter.show_envvar:
        notes.append(f"or {parameter.envvar}")
    end = f" [{'; '.join(notes)}]" if notes else ""
    return f"{parameter.help or ''}{end}".strip()


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    if not parameter.show_default or value is None or isinstance(value, bool) or value == "":
        return ""
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def _columns(rows: Iterable[Row], width: int) -> Iterator[str]:
    rows = list(rows)
    column = min(_NAMES_MAX, max(len(name) for name, _ in rows))
    indent = " " * (column + 4)
    for name, text in rows:
        lines = textwrap.wrap(
            text, max(width - len(indent), 20), break_on_hyphens=False, break_long_words=False
        )
        first = f"  {typer.style(name, bold=True) if _has_style() else name}"
        if len(name) > column or not lines:
            yield first + "\n"
        else:
            yield f"{first}{' ' * (column - len(name))}  {lines.pop(0)}\n"
        yield from (f"{indent}{line}\n" for line in lines)


def _wrapped(text: str, width: int, *, indent: str = "") -> str:
    return (
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        + "\n"
    )


def _heading(title: str) -> str:
    return typer.style(f"{title}:", bold=True) if _has_style() else f"{title}:"


def _has_style() -> bool:
    """Outside a terminal the program removes it."""
    return not os.environ.get("NO_COLOR")
