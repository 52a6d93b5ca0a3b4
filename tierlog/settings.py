"""A broker's settings as one typed object: flags over `TIERLOG_*` over the file over defaults.

* Settings are read once, at the edge, and passed in; only the command line reads the environment.
* An error names the setting, the value, the limit, and the source.
* An unknown name in the file is an error too: a misspelt limit would have no effect. An unknown
  variable is a warning: others set some, as Kubernetes does for a service called `tierlog`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from tierlog.api.http.settings import FindTable, HttpSettings
from tierlog.api.kafka.settings import BrokerConfig, KafkaSettings
from tierlog.broker.settings import BrokerSettings
from tierlog.host.loopback import is_loopback
from tierlog.hot_tier.log_config import KEYS_BY_NAME
from tierlog.object_store.ledger import PriceTable, default_prices
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.errors import SettingsError, did_you_mean
from tierlog.setting_kinds import Kind
from tierlog.setting_table import TABLE, Part, Setting
from tierlog.tables.shown import table_finder

log = structlog.get_logger(__name__)

# Read by clients and by the command line, not by a broker.
CLIENT_VARIABLES: Final = frozenset(
    ("TIERLOG_SERVER", "TIERLOG_TOKEN", "TIERLOG_TOKEN_FILE", "TIERLOG_CA_FILE", "TIERLOG_CONFIG")
)
TEST_VARIABLES: Final = "TIERLOG_TEST_"
DEFAULT_PORT: Final = 8640
KAFKA_PORT: Final = 9092


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of `tierlog serve`."""

    broker: BrokerSettings
    http: HttpSettings
    s3: S3Options
    store_url: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    insecure_no_auth: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    cluster_token_file: str | None = None
    catalog: str | None = None
    warehouse: str | None = None
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    kafka_listen: tuple[str, int] | None = None  # None: no Kafka listener


def load_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None,
) -> Settings:
    """Load a broker's settings. `flags`: by setting name; None if not given.

    Raises SettingsError.
    """
    values: dict[str, object] = {}
    for setting, raw, source in _given_values(flags, environment, file):
        flag_kind = setting.flag_kind if source.startswith("--") else None
        values[setting.name] = _parse(setting, raw, source, flag_kind or setting.kind)
    return _compose(values)


def _given_values(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None
) -> Iterator[tuple[Setting, object, str]]:
    """All values given, in ascending order of precedence."""
    by_name = {setting.name: setting for setting in TABLE}
    for name, raw in _file_members(file):
        if name not in by_name:
            near = did_you_mean(name, by_name)
            if name in KEYS_BY_NAME:
                near = f"; it is a topic setting: tierlog topic alter TOPIC --config {name}={raw}"
            raise SettingsError(f"{file}: unknown setting {name!r}{near}")
        yield by_name[name], raw, str(file)
    by_variable = {setting.variable: setting for setting in TABLE}
    for variable, raw in sorted(environment.items()):
        if variable in by_variable:
            yield by_variable[variable], raw, variable
        elif _is_unknown(variable):
            near = did_you_mean(variable, {*by_variable, *CLIENT_VARIABLES})
            log.warning(f"{variable}: unknown setting{near}")
    for name, raw in flags.items():
        if raw is not None:
            yield by_name[name], raw, by_name[name].flag_name


def _is_unknown(variable: str) -> bool:
    if not variable.startswith("TIERLOG_") or variable in CLIENT_VARIABLES:
        return False
    return not variable.startswith(TEST_VARIABLES)


def _file_members(file: Path | None) -> Iterator[tuple[str, object]]:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: {error}") from error
    yield from _flatten(document)


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Restore dotted names: TOML reads a dotted key as nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parse(setting: Setting, raw: object, source: str, kind: Kind) -> object:
    try:
        value = kind.parse(raw)
    except (ValueError, TypeError, OverflowError):
        raise SettingsError(
            f"{source}: {setting.name} must be {kind.expected}, not {raw!r}"
        ) from None
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if not setting.least <= value <= setting.most:
        raise SettingsError(
            f"{source}: {setting.name} must be between {setting.least} and {setting.most}, "
            f"not {value}"
        )
    return value


def _compose(values: Mapping[str, object]) -> Settings:
    by_part: dict[Part, dict[str, Any]] = {part: {} for part in Part}
    for setting in TABLE:
        if setting.name in values:
            by_part[setting.part][setting.field] = values[setting.name]
    if "data_dir" not in by_part[Part.BROKER]:
        raise SettingsError("data.dir is not set: --data-dir DIR, or TIERLOG_DATA_DIR")
    serve, store = by_part[Part.SERVE], by_part[Part.STORE]
    host, port = parse_listen(serve.get("listen", f"127.0.0.1:{DEFAULT_PORT}"))
    insecure = bool(serve.get("insecure_no_auth", False))
    prices = dataclasses.replace(default_prices(store.get("url")), **by_part[Part.PRICE])
    broker = BrokerSettings(**by_part[Part.BROKER], prices=prices)
    _check_replication(broker)
    tokens_file = _tokens_file(serve.get("tokens_file"), broker.data_dir)
    kafka_listen = _kafka_address(serve, "kafka.listen")
    exposed = list(_exposed((host, port), kafka_listen))
    if exposed and not insecure and not tokens_file.exists():
        raise SettingsError(
            f"{exposed[0]} is not a loopback address, and would be open to everyone: use "
            "127.0.0.1, create tokens with `tierlog token create`, or give --insecure-no-auth if a "
            "proxy in front controls access"
        )
    if broker.cluster_join and store.get("url", "").startswith("memory:"):
        raise SettingsError(
            f"store {store['url']} is this process's own memory, and the brokers of a cluster "
            "(--join) meet in their store: give s3://bucket/prefix or file:///folder"
        )
    if broker.cluster_join and tokens_file.exists() and "cluster_token_file" not in serve:
        raise SettingsError(
            f"there are tokens in {tokens_file}, and no --cluster-token-file: the brokers of a "
            "cluster show each other a token of scope cluster"
        )
    if ("tls_cert" in serve) != ("tls_key" in serve):
        raise SettingsError("tls.cert and tls.key must be set together")
    http = HttpSettings(
        **by_part[Part.HTTP],
        check_host=not insecure,
        tokens_file=tokens_file,
        tokens_required=not insecure and bool(exposed),
        shutdown_timeout_ms=broker.shutdown_timeout_ms,
        find_table=_table_finder(serve, store),
    )
    if 2 * http.expanded_max_bytes > http.decoding_max_bytes:
        raise SettingsError(
            f"http.expanded.max.bytes ({http.expanded_max_bytes}) is above half of "
            f"http.decoding.max.bytes ({http.decoding_max_bytes}): such a record could be written "
            "and not be read as text"
        )
    kafka = KafkaSettings(
        **by_part[Part.KAFKA], advertised=_kafka_address(serve, "kafka.advertised")
    )
    if kafka.request_max_bytes > kafka.queued_max_bytes:
        raise SettingsError(
            f"socket.request.max.bytes ({kafka.request_max_bytes}) is above "
            f"queued.max.request.bytes ({kafka.queued_max_bytes}): such a request might never begin"
        )
    return Settings(
        broker=broker,
        http=http,
        store_url=store.pop("url", None),
        s3=S3Options(**store),
        catalog=serve.get("catalog"),
        warehouse=serve.get("warehouse"),
        host=host,
        port=port,
        insecure_no_auth=insecure,
        tls_cert=serve.get("tls_cert"),
        tls_key=serve.get("tls_key"),
        cluster_token_file=serve.get("cluster_token_file"),
        kafka=kafka,
        kafka_listen=kafka_listen,
    )


def _table_finder(serve: Mapping[str, Any], store: Mapping[str, Any]) -> FindTable | None:
    if "catalog" not in serve:
        return None
    near = {f"s3.{name}": store[name] for name in ("endpoint", "region") if name in store}
    given = {"warehouse": serve["warehouse"]} if "warehouse" in serve else {}
    return table_finder(serve["catalog"], given, near)


def _check_replication(broker: BrokerSettings) -> None:
    """Raises SettingsError."""
    for name, factor in (
        ("default.replication.factor", broker.default_replication_factor),
        ("offsets.topic.replication.factor", broker.offsets_topic_replication_factor),
        (
            "share.coordinator.state.topic.replication.factor",
            broker.share_coordinator_state_topic_replication_factor,
        ),
        (
            "transaction.state.log.replication.factor",
            broker.transaction_state_log_replication_factor,
        ),
    ):
        if (factor or 1) > 1 and not broker.cluster_join:
            raise SettingsError(
                f"{name} ({factor}) is above 1, and a broker that is alone has no other for a "
                "replica: give --join"
            )
    if broker.replica_fetch_wait_max_ms > broker.replica_lag_time_max_ms:
        raise SettingsError(
            f"replica.fetch.wait.max.ms ({broker.replica_fetch_wait_max_ms}) is above "
            f"replica.lag.time.max.ms ({broker.replica_lag_time_max_ms}): replicas that wait would "
            "be taken for slow ones"
        )


def _exposed(listen: tuple[str, int], kafka_listen: tuple[str, int] | None) -> Iterator[str]:
    """The addresses that others than this machine can reach."""
    for name, address in (("listen", listen), ("kafka.listen", kafka_listen)):
        if address is not None and not is_loopback(address[0]):
            yield f"{name} {address[0]}:{address[1]}"


def _kafka_address(serve: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    given = serve.get(name.replace(".", "_"))
    return None if given is None else parse_listen(given, name=name, default_port=KAFKA_PORT)


def _tokens_file(given: str | None, data_dir: Path) -> Path:
    """Raises SettingsError if a given file is missing: the broker would be open to everyone."""
    if given is None:
        return data_dir / "tierlog" / "tokens.json"
    if not Path(given).exists():
        raise SettingsError(
            f"tokens.file {given} does not exist: `tierlog token create` creates it"
        )
    return Path(given)


def parse_listen(
    listen: str, *, name: str = "listen", default_port: int = DEFAULT_PORT
) -> tuple[str, int]:
    """Parse `HOST:PORT`, `:PORT` or `HOST`, with IPv6 in brackets. Raises SettingsError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*))(?::(\d{1,5}))?", listen)
    port = int(match[3] or default_port) if match else -1
    if match is None or not 0 <= port <= 65535 or listen.isdecimal():  # a bare port is not a host
        raise SettingsError(
            f"{name} must be HOST:PORT, as in 127.0.0.1:{default_port}, not {listen!r}"
        )
    return match[1] or match[2] or "127.0.0.1", port


def described(settings: Settings) -> list[BrokerConfig]:
    """Every setting, by its name."""
    parts: dict[Part, object] = {
        Part.SERVE: settings,
        Part.BROKER: settings.broker,
        Part.HTTP: settings.http,
        Part.STORE: settings.s3,
        Part.PRICE: settings.broker.prices,
        Part.KAFKA: settings.kafka,
    }
    elsewhere: dict[str, object] = {
        "listen": _joined((settings.host, settings.port)),
        "store": settings.store_url,
        "tokens.file": settings.http.tokens_file,
        "kafka.listen": _joined(settings.kafka_listen),
        "kafka.advertised": _joined(settings.kafka.advertised),
    }
    return [
        BrokerConfig(
            one.name,
            elsewhere[one.name] if one.name in elsewhere else getattr(parts[one.part], one.field),
            default_of(one),
            one.doc,
        )
        for one in TABLE
    ]


def _joined(address: tuple[str, int] | None) -> str | None:
    if address is None:
        return None
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_of(setting: Setting) -> object:
    """The field's default; None if there is none, or if it depends on the disk."""
    if setting.name == "listen":
        return f"127.0.0.1:{DEFAULT_PORT}"
    owner = {
        Part.BROKER: BrokerSettings,
        Part.HTTP: HttpSettings,
        Part.STORE: S3Options,
        Part.PRICE: PriceTable,
        Part.KAFKA: KafkaSettings,
    }
    kind = owner.get(setting.part, Settings)
    found = {one.name: one.default for one in dataclasses.fields(kind)}.get(setting.field)
    return None if found is dataclasses.MISSING else found
