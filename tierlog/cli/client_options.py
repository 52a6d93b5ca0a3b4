"""The options of every command that uses a client.

* `client_command` decorates a function whose first parameter is a `Client`: it adds the options
  `--server`, `--token-file` and `--ca-file`, and opens and closes the client around the call.
* `client_or_bucket_command` adds `--store` and its options as well: if that is given, the function
  gets the bucket's options in place of a client.
* The client reads `TIERLOG_TOKEN` and `TIERLOG_TOKEN_FILE` itself: as option defaults, one variable
  would take precedence over the other's flag.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tierlog.cli.bucket_options import (
    BucketOptions,
    EndpointOption,
    OfflineStoreOption,
    RegionOption,
)
from tierlog.cli.completion import complete_topic
from tierlog.cli.option_groups import with_group
from tierlog.cli.output import Output, note
from tierlog.cli.table import printable
from tierlog.client.wire import DEFAULT_SERVER
from tierlog.record_format.errors import TierlogError, UnknownTopic, did_you_mean

if TYPE_CHECKING:
    from tierlog.client import Client

Server = Annotated[
    str, typer.Option("--server", envvar="TIERLOG_SERVER", help="URL of the broker.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", help="Prefer TIERLOG_TOKEN: other users can see a command line.", hidden=True
    ),
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
    typer.Option(
        "--output", metavar="FORM", help="text, json, or auto: text on a terminal, JSON elsewhere."
    ),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Do not ask for confirmation; required without a terminal.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Which broker, and how to connect to it."""

    server: Server = DEFAULT_SERVER
    token: Token = None
    token_file: TokenFile = None
    ca_file: CaFile = None


ClientOrBucket: TypeAlias = "Client | BucketOptions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOrBucketOptions(ClientOptions):
    """A broker, or with `--store` the bucket alone."""

    store: OfflineStoreOption = None
    endpoint: EndpointOption = None
    region: RegionOption = None


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of `function(client, ...)`."""
    return with_group(function, ClientOptions, _with_client)


def client_or_bucket_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of `function(source, ...)`, where `source` is a ClientOrBucket."""
    return with_group(function, ClientOrBucketOptions, _with_source)


def _with_source(options: ClientOrBucketOptions, call: partial[None]) -> None:
    bucket = BucketOptions.if_given(options.store, options.endpoint, options.region)
    if bucket is None:
        _with_client(options, call)
    else:
        call(bucket)


def _with_client(options: ClientOptions, call: partial[None]) -> None:
    from tierlog.client import BrokerUnreachable, Client, NotOfferedHere

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
            if os.strerror(errno.ECONNREFUSED) in str(error):
                error.args = (f"{error}; `tierlog dev` starts a broker, --server selects another",)
            raise
        except NotOfferedHere as error:
            if options.server.rstrip("/").endswith("/v1"):
                error.args = (f"{error}; the server's address is without /v1",)
            raise


def confirm(what: str, *, yes: bool) -> None:
    """Ask before an irreversible action, or exit. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(f"{what}: confirm with --yes")
    if not typer.confirm(f"{printable(what)}. Continue?", err=True):
        note("nothing was deleted")
        raise typer.Exit(1)


def topic_names(client: Client) -> list[str]:
    """The names of all topics, including internal ones, for `TopicOrAll`."""
    return [topic.name for topic in client.list_topics(internal=True)]


def _near_topic(client: Client, topic: str) -> str:
    """A hint at a similar topic that the caller may see; empty if topics cannot be listed, or if
    the topic exists: it was re-created.
    """
    try:
        topics = [one.name for one in client.list_topics()]
    except TierlogError:
        return ""
    if topic in topics:
        return ""
    return did_you_mean(topic, topics) or "; `tierlog topic list` lists the topics"
