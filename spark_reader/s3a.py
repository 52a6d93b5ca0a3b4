"""What a Spark session's settings for Hadoop's S3A say, for what the source's options leave open.

Rules that keep it honest:

* What works for `s3a://` works here: the same names, those of a bucket (`fs.s3a.bucket.NAME.*`)
  before those of all, and credentials from Hadoop's credential providers.
* Options take precedence over S3A's settings, and these over AWS's own chain. The three credentials
  belong together: they come from one place or the other, never from both.
* Hadoop's defaults count for nothing. Keys that S3A would not use, because other providers are
  configured, are not used here either.
* No value is in a repr.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from cold_tier.s3_options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PREFIX: Final = "fs.s3a."
_SECRETS: Final = ("access.key", "secret.key", "session.token")
_PROVIDERS: Final = "aws.credentials.provider"
_NAMES: Final = (
    *_SECRETS,
    _PROVIDERS,
    "endpoint",
    "endpoint.region",
    "path.style.access",
    "connection.ssl.enabled",
)
_KEY_PROVIDERS: Final = ("SimpleAWSCredentialsProvider", "TemporaryAWSCredentialsProvider")
_HADOOPS_DEFAULTS: Final = ["core-default.xml"]
_AWS: Final = re.compile(r"s3(?:[.-](?P<region>[a-z]+(?:-[a-z]+)+-\d))?\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True)
class S3ASettings:
    """`values` by their names without `fs.s3a.`."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    def complete(self, given: S3Options, store: str | None) -> S3Options:
        """`given`, and what is None there from the settings for the bucket of `store`."""
        url = urlsplit(store or "")
        if url.scheme != "s3":
            return given
        found = _of_bucket(self.values, url.netloc)
        endpoint, region = _place(found)
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
    """The settings of a session as they are now."""
    java_session = getattr(session, "_jsparkSession", None)  # there is none under Spark Connect
    if java_session is None:
        return S3ASettings(_of_spark(session.conf.getAll))
    return S3ASettings(_of_hadoop(session, java_session.sessionState().newHadoopConf()))


def _of_hadoop(session: Any, conf: Any) -> dict[str, str]:
    found = {
        name: value
        for name, value in conf.getPropsWithPrefix(_PREFIX).items()
        if _is_wanted(name) and not _is_default(conf, name)
    }
    for name in _SECRETS:
        characters = conf.getPassword(_PREFIX + name)  # a credential provider's, or the setting
        if characters is not None:
            text = session._jvm.java.lang.String.valueOf(characters)  # noqa: SLF001  py4j's
            found[name] = text
    return found


def _is_default(conf: Any, name: str) -> bool:
    return list(conf.getPropertySources(_PREFIX + name) or ()) == _HADOOPS_DEFAULTS


def _of_spark(conf: Mapping[str, str]) -> dict[str, str]:
    """As Spark hands its own settings to Hadoop: `spark.hadoop.` first, then those without."""
    found: dict[str, str] = {}
    for prefix in (f"spark.hadoop.{_PREFIX}", _PREFIX):
        for key, value in conf.items():
            name = key.removeprefix(prefix)
            if key != name and _is_wanted(name):
                found[name] = value
    return found


def _is_wanted(name: str) -> bool:
    of_bucket = name.startswith("bucket.") and name.endswith(tuple(f".{one}" for one in _NAMES))
    return name in _NAMES or of_bucket


def _of_bucket(values: Mapping[str, str], bucket: str) -> dict[str, str]:
    """What is said, for one bucket; a setting that is empty says nothing."""
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


def _place(found: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Endpoint and region. AWS's own endpoints are none: boto3 knows them by their region."""
    region = found.get("endpoint.region")
    region = None if region == "sdk" else region  # S3A's word for AWS's chain
    endpoint = found.get("endpoint")
    if endpoint is None:
        return None, region
    if own := _AWS.fullmatch(endpoint.partition("://")[2] or endpoint):
        return None, region or own["region"]
    if "://" not in endpoint:
        scheme = "http" if _boolean(found, "connection.ssl.enabled") is False else "https"
        endpoint = f"{scheme}://{endpoint}"
    return endpoint, region


def _boolean(found: Mapping[str, str], name: str) -> bool | None:
    """None for what is neither, as it is for Hadoop: the default."""
    return {"true": True, "false": False}.get(found.get(name, "").lower())
