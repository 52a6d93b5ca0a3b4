"""Uses a Spark session's settings of Hadoop's S3A connector as defaults for the source's options.

* Settings that work for `s3a://` work here: the same names, those of a bucket
  (`fs.s3a.bucket.NAME.*`) before general ones, and credentials from Hadoop's credential providers.
* Options take precedence over S3A's settings, and those over AWS's provider chain. The three
  credentials are never mixed: all come from the options, or all from the settings.
* Hadoop's built-in defaults are ignored. Access keys that S3A would not use, because other
  providers are configured, are not used here either.
* Reprs contain no values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tierlog.object_store.s3_connection import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tierlog.spark_reader.workarounds import Hadoop

_PREFIX: Final = "fs.s3a."
_SECRETS: Final = ("access.key", "secret.key", "session.token")
_PROVIDERS: Final = "aws.credentials.provider"
_PROVIDER_PATH: Final = "hadoop.security.credential.provider.path"
_OWN_PATH: Final = "security.credential.provider.path"
_NAMES: Final = (
    *_SECRETS,
    _PROVIDERS,
    "endpoint",
    "endpoint.region",
    "path.style.access",
    "connection.ssl.enabled",
)
_KEY_PROVIDERS: Final = ("SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider")
_HADOOP_DEFAULTS: Final = ["core-default.xml"]
_AWS: Final = re.compile(r"s3(?:[.-](?P<region>[a-z]+(?:-[a-z]+)+-\d))?\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True)
class S3ASettings:
    """The settings, by name without `fs.s3a.`."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    def complete(self, given: S3Options, store: str | None) -> S3Options:
        """`given`, with options that are None taken from the settings for the bucket of `store`."""
        url = urlsplit(store or "")
        if url.scheme != "s3":
            return given
        found = _of_bucket(self.values, url.netloc)
        endpoint, region = _endpoint_and_region(found)
        if not (given.access_key_id or given.secret_access_key or given.session_token):
            given = _with_credentials(given, found)
        return replace(
            given,
            endpoint=given.endpoint or endpoint,
            region=given.region or region,
            path_style=_boolean(found, "path.style.access")
            if given.path_style is None
            else given.path_style,
        )


def settings_of(session: SparkSession) -> S3ASettings:
    """The session's current settings."""
    from tierlog.spark_reader.workarounds import hadoop_of  # needs pyspark, unlike the options

    hadoop = hadoop_of(session)
    return S3ASettings(_of_spark(session.conf.getAll) if hadoop is None else _of_hadoop(hadoop))


def _of_hadoop(hadoop: Hadoop) -> dict[str, str]:
    conf = hadoop.conf
    settings = dict(conf.getPropsWithPrefix(_PREFIX))
    found = {
        name: value
        for name, value in settings.items()
        if _is_wanted(name) and not _is_default(conf, name)
    }
    found |= _passwords(hadoop, settings.get(_OWN_PATH, ""))
    for name, path in settings.items():
        if _is_of_bucket(name, (_OWN_PATH,)):  # it replaces the general one
            bucket = name.removesuffix(_OWN_PATH)
            passwords = _passwords(hadoop, path)
            general = {f"{bucket}{one}": passwords[one] for one in _SECRETS if one in passwords}
            own = {one: value for one, value in passwords.items() if one.startswith(bucket)}
            found = general | found | own
    return found


def _passwords(hadoop: Hadoop, own_path: str) -> dict[str, str]:
    """The secrets from credential providers, or else from the settings. `own_path`: S3A's own
    providers, which come before Hadoop's.
    """
    conf = hadoop.jvm.org.apache.hadoop.conf.Configuration(hadoop.conf)
    paths = (own_path.strip(), conf.get(_PROVIDER_PATH))
    conf.set(_PROVIDER_PATH, ",".join(filter(None, paths)))
    found: dict[str, str] = {}
    for name in (*_SECRETS, *_bucket_secrets(hadoop.jvm, conf)):
        characters = conf.getPassword(_PREFIX + name)
        if characters is not None:
            found[name] = hadoop.jvm.java.lang.String.valueOf(characters)
    return found


def _bucket_secrets(jvm: Any, conf: Any) -> list[str]:
    """The names of secrets for single buckets in Hadoop's credential providers."""
    factory = jvm.org.apache.hadoop.security.alias.CredentialProviderFactory
    aliases = [one for provider in factory.getProviders(conf) for one in provider.getAliases()]
    names = [alias.removeprefix(_PREFIX) for alias in aliases if alias.startswith(_PREFIX)]
    return [name for name in names if _is_of_bucket(name, _SECRETS)]


def _is_default(conf: Any, name: str) -> bool:
    return list(conf.getPropertySources(_PREFIX + name) or ()) == _HADOOP_DEFAULTS


def _of_spark(conf: Mapping[str, str]) -> dict[str, str]:
    """As Spark passes its settings to Hadoop: those with `spark.hadoop.` first, then without."""
    found: dict[str, str] = {}
    for prefix in (f"spark.hadoop.{_PREFIX}", _PREFIX):
        for key, value in conf.items():
            name = key.removeprefix(prefix)
            if key != name and _is_wanted(name):
                found[name] = value
    return found


def _is_wanted(name: str) -> bool:
    return name in _NAMES or _is_of_bucket(name, _NAMES)


def _is_of_bucket(name: str, names: Sequence[str]) -> bool:
    return name.startswith("bucket.") and name.endswith(tuple(f".{one}" for one in names))


def _of_bucket(values: Mapping[str, str], bucket: str) -> dict[str, str]:
    """The settings for one bucket; empty ones are ignored."""
    found: dict[str, str] = {}
    for name in _NAMES:
        text = values.get(f"bucket.{bucket}.{name}", values.get(name, "")).strip()
        if text:
            found[name] = text
    return found


def _with_credentials(given: S3Options, found: Mapping[str, str]) -> S3Options:
    providers = found.get(_PROVIDERS)
    uses_keys = providers is None or any(one in providers for one in _KEY_PROVIDERS)
    if not (uses_keys and "access.key" in found and "secret.key" in found):
        return given
    return replace(
        given,
        access_key_id=found["access.key"],
        secret_access_key=found["secret.key"],
        session_token=found.get("session.token"),
    )


def _endpoint_and_region(found: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The endpoint is None for AWS's own, which boto3 derives from the region."""
    region = found.get("endpoint.region")
    region = None if region == "sdk" else region  # which in S3A means AWS's provider chain
    endpoint = found.get("endpoint")
    if endpoint is None:
        return None, region
    if aws := _AWS.fullmatch(endpoint.partition("://")[2] or endpoint):
        return None, region or aws["region"]
    if "://" not in endpoint:
        scheme = "http" if _boolean(found, "connection.ssl.enabled") is False else "https"
        endpoint = f"{scheme}://{endpoint}"
    return endpoint, region


def _boolean(found: Mapping[str, str], name: str) -> bool | None:
    """None, the default, for any other value, as in Hadoop."""
    return {"true": True, "false": False}.get(found.get(name, "").lower())
