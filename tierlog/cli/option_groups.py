"""Options that several commands share: a frozen dataclass whose fields are typer options, and
`setting_option` for a flag of `serve`.

* typer reads a command's signature, so the fields are appended to the command's own options.
* The command's function takes the group as its first argument (or what `call` passes instead).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import partial, wraps
from typing import Any, TypeVar, get_type_hints

import typer

from tierlog.setting_table import TABLE, Setting

T = TypeVar("T")


def setting_option(name: str, **more: Any) -> Any:
    """The option of a command that has a flag of `serve`: with its name, variable and range, and,
    unless `more` has another `help`, its explanation.
    """
    setting = next(one for one in TABLE if one.name == name)
    given: dict[str, Any] = {"envvar": setting.variable, "help": setting.doc}
    return typer.Option(setting.flag_name, callback=_check_of(setting), **given | more)


def _check_of(setting: Setting) -> Callable[[Any], Any]:
    """Instead of typer's `min` and `max`, whose text takes the place of the names in help."""

    def check(value: Any) -> Any:
        least, most = setting.least, setting.most
        if isinstance(value, int) and not least <= value <= most:
            raise typer.BadParameter(f"must be between {least} and {most}, not {value}")
        return value

    return check


def takes(group: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of `function(group, ...)`."""
    return lambda function: with_group(function, group, lambda given, rest: rest(given))


def with_group(
    function: Callable[..., None], group: type[T], call: Callable[[T, partial[None]], None]
) -> Callable[..., None]:
    """Make a command of `function(first, ...)`; `call(group, rest)` calls `rest(first)`."""
    own, shared = _own_parameters(function), _group_parameters(group)

    @wraps(function)
    def command(**arguments: Any) -> None:
        given = group(**{one.name: arguments.pop(one.name) for one in shared})
        call(given, partial(function, **arguments))

    del command.__wrapped__  # its signature differs
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (*own, *shared)}
    return command


def _own_parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    """All but the first; keyword-only, so that those with defaults may precede those without."""
    first, *own = inspect.signature(function).parameters.values()
    # The first is not an option, and its type may be imported only for type checking.
    hints = get_type_hints(function, include_extras=True, localns={str(first.annotation): object})
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own
    ]


def _group_parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=_default(one),
        )
        for one in fields(group)
    ]


def _default(one: Field[Any]) -> Any:
    return inspect.Parameter.empty if one.default is MISSING else one.default
