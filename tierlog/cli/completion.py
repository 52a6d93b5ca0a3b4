"""Shell completion of names that only the broker knows.

The broker is the one that the command line or the environment names. If it does not respond within
`TIMEOUT_S`, or refuses, nothing is offered: a shell's prompt is no place for errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import typer

from tierlog.record_format.errors import TierlogError

if TYPE_CHECKING:
    from tierlog.client import Client

TIMEOUT_S: Final = 1.0


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    return _ask(ctx, lambda client: [one.name for one in client.list_topics(prefix=incomplete)])


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    names = _ask(ctx, lambda client: [one.group for one in client.groups()])
    return [name for name in names if name.startswith(incomplete)]


def _ask(ctx: typer.Context, names: Callable[[Client], Iterable[str]]) -> list[str]:
    from tierlog.client import Client
    from tierlog.client.exchange import NO_RETRIES

    options = {name: ctx.params.get(name) for name in ("server", "token", "token_file", "ca_file")}
    try:
        with Client(**options, timeout_s=TIMEOUT_S, retries=NO_RETRIES) as client:
            # One name per line: others' names may contain line breaks.
            return [name for name in names(client) if name.isprintable()]
    except TierlogError:
        return []
