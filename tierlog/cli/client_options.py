"""The options that every command of a client has, told once.

`client_command` gives a function that takes a `Client` first the options `--server`, `--token-file`
and `--ca-file`, and opens and closes the client around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from record_format.errors import TierlogError, UnknownTopic
from record_format.near_miss import did_you_mean
from tierlog.cli.output import Output

if TYPE_CHECKING:
    from tierlog.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8640"

Server = Annotated[
    str, typer.Option("--server", envvar="TIERLOG_SERVER", help="URL of the broker.")
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="TIERLOG_TOKEN", help="Better in TIERLOG_TOKEN.", hidden=True),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="TIERLOG_TOKEN_FILE", help="File that holds a token."),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", envvar="TIERLOG_CA_FILE", help="Authority of the broker's TLS."),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
OutputOption = Annotated[
    Output,
    typer.Option("--output", help="text, json, or auto: text on a terminal, JSON elsewhere."),
]

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "server": (Server, DEFAULT_SERVER),
    "token": (Token, None),
    "token_file": (TokenFile, None),
    "ca_file": (CaFile, None),
}


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """A command out of `function(client, ...)`."""
    hints = get_type_hints(function, include_extras=True, localns={"Client": object})
    own = list(inspect.signature(function).parameters.values())[1:]

    @wraps(function)
    def command(**arguments: Any) -> None:
        from tierlog.client import Client

        connection = {name: arguments.pop(name) for name in _OPTIONS}
        with Client(connection.pop("server"), **connection) as client:
            try:
                function(client, **arguments)
            except UnknownTopic as error:
                error.args = (f"{error}{_near_topic(client, error.topic)}",)
                raise

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in own
    ]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
        )
        for name, (annotation, default) in _OPTIONS.items()
    ]
    del command.__wrapped__  # its signature is another
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _near_topic(client: Client, topic: str) -> str:
    """Among those that the caller may see; nothing where they cannot be asked for."""
    try:
        return did_you_mean(topic, [one.name for one in client.list_topics()])
    except TierlogError:
        return ""
