"""The options of every command that uses a client.

* `client_command` takes a function whose first parameter is a `Client`: it adds the options
  `--server`, `--token-file` and `--ca-file`, and opens and closes the client around the call.
* The client reads `TIERLOG_TOKEN` and `TIERLOG_TOKEN_FILE` itself: as defaults of two options, one
  variable would win over the flag of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from record_format.errors import TierlogError, UnknownTopic
from record_format.name_suggestions import did_you_mean
from tierlog.cli.completion import complete_topic
from tierlog.cli.option_groups import with_group
from tierlog.cli.output import Output, note
from tierlog.cli.table import printable
from tierlog.client.wire import DEFAULT_SERVER

if TYPE_CHECKING:
    from tierlog.client import Client

Server = Annotated[
    str, typer.Option("--server", envvar="TIERLOG_SERVER", help="URL of the broker.")
]
Token = Annotated[
    str | None,
    typer.Option("--token", help="Better in TIERLOG_TOKEN.", hidden=True),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with a token; by default TIERLOG_TOKEN, or the file in TIERLOG_TOKEN_FILE.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="TIERLOG_CA_FILE",
        help="PEM file of the authority that signed the broker's certificate.",
    ),
]
TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic.", autocompletion=complete_topic)
]
TopicOrAll = Annotated[
    str | None,
    typer.Argument(
        metavar="TOPIC", help="The topic; all of them by default.", autocompletion=complete_topic
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option("--output", help="text, json, or auto: text on a terminal, JSON elsewhere."),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Do not ask; required where there is no terminal.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Which broker, and how to connect to it."""

    server: Server = DEFAULT_SERVER
    token: Token = None
    token_file: TokenFile = None
    ca_file: CaFile = None


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of `function(client, ...)`."""
    return with_group(function, ClientOptions, _with_client)


def _with_client(options: ClientOptions, call: partial[None]) -> None:
    if call.keywords.get("store") is not None:  # only the bucket: no broker is asked
        call(None)
        return
    from tierlog.client import Client
    from tierlog.client.exchange import BrokerUnreachable

    with Client(
        options.server,
        token=options.token,
        token_file=options.token_file,
        ca_file=options.ca_file,
    ) as client:
        try:
            call(client)
        except UnknownTopic as error:
            error.args = (f"{error}{_near_topic(client, error.topic)}",)
            raise
        except BrokerUnreachable as error:
            error.args = (f"{error}; `tierlog dev` starts a broker, --server names another",)
            raise


def confirm(what: str, *, yes: bool) -> None:
    """Whether to go on with what cannot be undone. Where nobody can be asked, `--yes` says it."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(f"{what}: confirm with --yes")
    if not typer.confirm(f"{printable(what)}: go on?", err=True):
        note("nothing was deleted")
        raise typer.Exit(1)


def topic_names(client: Client) -> list[str]:
    """Of all topics, for `TopicOrAll`: internal ones too."""
    return [topic.name for topic in client.list_topics(internal=True)]


def _near_topic(client: Client, topic: str) -> str:
    """Among the topics that the caller may see; empty if they cannot be listed."""
    try:
        topics = [one.name for one in client.list_topics()]
    except TierlogError:
        return ""
    return did_you_mean(topic, topics) or "; `tierlog topic list` shows those that there are"
