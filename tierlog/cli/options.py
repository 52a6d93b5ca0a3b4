"""Options that several commands share: of a setting, a client, a bucket without a broker.

* A group of options is a frozen dataclass whose fields are typer options. typer reads a command's
  signature, so the fields are appended to the command's own; the command's function takes the group
  as its first argument, or what `call` passes instead.
* `client_command` decorates a function whose first parameter is a `Client`: it adds the options
  `--server`, `--token-file` and `--ca-file`, and opens and closes the client around the call.
* `client_or_bucket_command` adds `--store` and its options as well: if that is given, the function
  gets the bucket's options in place of a client.
* The options of a bucket are those of `serve`: the same names, variables and AWS credential chain.
* The client reads `TIERLOG_TOKEN` and `TIERLOG_TOKEN_FILE` itself: as option defaults, one variable
  would take precedence over the other's flag.
* Completion asks the broker that the command line or the environment names. If it does not respond
  within `TIMEOUT_S`, or refuses, nothing is offered: a shell's prompt is no place for errors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import typer

from tierlog.cli.help import COMMON_OPTIONS
from tierlog.cli.output import Output, note, printable
from tierlog.client.wire import DEFAULT_SERVER
from tierlog.record_format.errors import StoreUnavailable, TierlogError, UnknownTopic, did_you_mean
from tierlog.record_format.units import parse_size
from tierlog.setting_table import TABLE, Setting

if TYPE_CHECKING:
    from tierlog.cli.bucket_reader import BucketReader
    from tierlog.client.client import Client
    from tierlog.host.retry import RetryPolicy
    from tierlog.object_store.store import ObjectStore


T = TypeVar("T")


def size_of(option: str, text: str, *, least: int = 0) -> int:
    """Bytes, as in a setting. Raises BadParameter."""
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    if size_bytes < least:
        raise typer.BadParameter(f"{option}: {text!r} is below {least}")
    return size_bytes


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
    hints = get_type_hints(group, include_extras=True)  # of a base class, by its own module
    shared = {
        name: one.replace(annotation=hints[name])
        for name, one in inspect.signature(group).parameters.items()
    }

    def command(**arguments: Any) -> None:
        given = group(**{name: arguments.pop(name) for name in shared})
        call(given, partial(function, **arguments))

    parameters = [*_own_parameters(function), *shared.values()]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _own_parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    """All but the first; keyword-only, so that those with defaults may precede those without."""
    first, *own = inspect.signature(function).parameters.values()
    # The first is not an option, and its type may be imported only for type checking.
    hints = get_type_hints(function, include_extras=True, localns={str(first.annotation): object})
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own
    ]


StoreOption = Annotated[
    str, setting_option("store", metavar="URL", help="s3://bucket/prefix or file:///folder.")
]
OfflineStoreOption = Annotated[
    str | None,  # no variable: TIERLOG_STORE is not a request to bypass the broker
    typer.Option("--store", metavar="URL", help="Read this bucket directly, without a broker."),
]
EndpointOption = Annotated[str | None, setting_option("s3.endpoint", metavar="URL")]
RegionOption = Annotated[str | None, setting_option("s3.region", metavar="NAME")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Which bucket, and how to reach it."""

    store: StoreOption
    endpoint: EndpointOption = None
    region: RegionOption = None

    @classmethod
    def if_given(
        cls, store: str | None, endpoint: str | None, region: str | None
    ) -> BucketOptions | None:
        """None if no store is given."""
        return None if store is None else cls(store=store, endpoint=endpoint, region=region)

    @property
    def flags(self) -> list[str]:
        """As arguments of a command line."""
        given = {
            "--store": self.store,
            "--s3-endpoint": self.endpoint,
            "--s3-region": self.region,
        }
        return [part for flag, value in given.items() if value for part in (flag, value)]

    def open(self, policy: RetryPolicy | None = None) -> ObjectStore:
        """Open the store, by default with a broker's retries. Raises ConfigurationError if there is
        no such bucket.
        """
        from tierlog.object_store.open import open_store
        from tierlog.object_store.s3_connection import S3Options

        options = S3Options(endpoint=self.endpoint or None, region=self.region or None)
        return open_store(self.store, options, must_exist=True, policy=policy)

    @contextmanager
    def opened(self) -> Iterator[ObjectStore]:
        """For reading without a broker: retries ride out an outage."""
        from tierlog.host.retry import OUTAGE_POLICY

        store = self.open(OUTAGE_POLICY)
        try:
            yield store
        except StoreUnavailable as error:
            raise StoreUnavailable(f"store {self.store}: {error}") from error
        finally:
            store.close()

    @contextmanager
    def reader(self) -> Iterator[BucketReader]:
        """Open the bucket for reading its topics, manifests and segments without a broker."""
        from tierlog.cli.bucket_reader import BucketReader

        with self.opened() as store:
            yield BucketReader(store)


TIMEOUT_S: Final = 1.0


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    return _ask(ctx, lambda client: [one.name for one in client.list_topics(prefix=incomplete)])


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    names = _ask(ctx, lambda client: [one.group for one in client.groups()])
    return [name for name in names if name.startswith(incomplete)]


def complete_transactional_id(ctx: typer.Context, incomplete: str) -> list[str]:
    found = _ask(
        ctx, lambda client: [it.transactional_id for it in client.list_transactions().transactions]
    )
    return [name for name in found if name.startswith(incomplete)]


def _ask(ctx: typer.Context, names: Callable[[Client], Iterable[str]]) -> list[str]:
    from tierlog.client.client import Client
    from tierlog.client.exchange import NO_RETRIES

    options = {name: ctx.params.get(name) for name in ("server", "token", "token_file", "ca_file")}
    try:
        with Client(**options, timeout_s=TIMEOUT_S, retries=NO_RETRIES) as client:
            # One name per line: others' names may contain line breaks.
            return [name for name in names(client) if name.isprintable()]
    except TierlogError:
        return []


Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="TIERLOG_SERVER",
        metavar="URL",
        help="URL of the broker; of several, with commas between them.",
        rich_help_panel=COMMON_OPTIONS,
    ),
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
        metavar="FILE",
        rich_help_panel=COMMON_OPTIONS,
        help="File with a token; by default TIERLOG_TOKEN, or the file in TIERLOG_TOKEN_FILE.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="TIERLOG_CA_FILE",
        metavar="FILE",
        rich_help_panel=COMMON_OPTIONS,
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
        "--output",
        metavar="FORM",
        rich_help_panel=COMMON_OPTIONS,
        help="text, json, or auto: text on a terminal, JSON elsewhere.",
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
    return with_group(function, ClientOptions, with_client)


def client_or_bucket_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of `function(source, ...)`, where `source` is a ClientOrBucket."""
    return with_group(function, ClientOrBucketOptions, _with_source)


def _with_source(options: ClientOrBucketOptions, call: partial[None]) -> None:
    bucket = BucketOptions.if_given(options.store, options.endpoint, options.region)
    if bucket is None:
        with_client(options, call)
    else:
        call(bucket)


def with_client(options: ClientOptions, call: Callable[[Client], None]) -> None:
    """`call` with a client; its errors get hints."""
    from tierlog.client.client import Client
    from tierlog.client.exchange import BrokerUnreachable
    from tierlog.client.problems import NotOfferedHere
    from tierlog.client.workarounds import is_refused

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
            if is_refused(str(error)):
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
