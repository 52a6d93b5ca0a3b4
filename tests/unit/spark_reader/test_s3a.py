import pytest

from tierlog.object_store.s3_connection import S3Options
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.s3a import S3ASettings, settings_of

KEYS = {"access.key": "AK-all", "secret.key": "SK-all", "session.token": "ST-all"}


def complete(values, given=None, store="s3://lake/prefix"):
    return S3ASettings(values).complete(given or S3Options(), store)


def endpoint_and_region(**values):
    found = complete({name.replace("_", "."): value for name, value in values.items()})
    return found.endpoint, found.region


def test_settings_of_the_bucket_take_precedence():
    values = KEYS | {
        "endpoint": "http://all:9000",
        "path.style.access": "TRUE",
        "bucket.lake.access.key": " AK-lake ",
        "bucket.lake.endpoint": "http://lake:9000",
        "bucket.other.secret.key": "SK-other",
        "bucket.lake.path.style.access": "false",
        "bucket.lake.endpoint.region": "",
    }
    assert complete(values) == S3Options(
        endpoint="http://lake:9000",
        path_style=False,
        access_key_id="AK-lake",
        secret_access_key="SK-all",
        session_token="ST-all",
    )
    other = complete(values, store="s3://other")
    assert (other.access_key_id, other.secret_access_key) == ("AK-all", "SK-other")
    assert (other.endpoint, other.path_style) == ("http://all:9000", True)


def test_options_take_precedence_and_credentials_are_never_mixed():
    values = KEYS | {"endpoint": "all:9000", "endpoint.region": "eu-west-1"}
    given = S3Options(
        access_key_id="mine", secret_access_key="my secret", region="r", path_style=False
    )
    found = complete(values, given)
    assert (found.access_key_id, found.secret_access_key) == ("mine", "my secret")
    assert found.session_token is None
    assert (found.endpoint, found.region, found.path_style) == ("https://all:9000", "r", False)
    assert complete({"access.key": "half"}) == S3Options()
    assert complete(KEYS, store="file:///lake") == complete(KEYS, store=None) == S3Options()


@pytest.mark.parametrize(
    ("providers", "used"),
    [
        ("org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider", True),
        ("a.B,\n org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider", True),
        ("org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider", False),
    ],
)
def test_keys_are_used_only_with_providers_that_use_them(providers, used):
    found = complete(KEYS | {"bucket.lake.aws.credentials.provider": providers})
    assert (found.access_key_id == "AK-all") is used


def test_endpoints_are_parsed_as_s3a_does():
    assert endpoint_and_region(endpoint="minio:9000") == ("https://minio:9000", None)
    plain = {"endpoint": "minio:9000", "connection_ssl_enabled": "false"}
    assert endpoint_and_region(**plain) == ("http://minio:9000", None)
    assert (
        endpoint_and_region(endpoint="https://minio", connection_ssl_enabled="false")[0]
        == "https://minio"
    )
    assert endpoint_and_region(endpoint="s3.amazonaws.com") == (None, None)
    assert endpoint_and_region(endpoint="https://s3.eu-central-1.amazonaws.com") == (
        None,
        "eu-central-1",
    )
    assert endpoint_and_region(endpoint="s3-us-gov-west-1.amazonaws.com") == (None, "us-gov-west-1")
    assert endpoint_and_region(endpoint="s3.cn-north-1.amazonaws.com.cn", endpoint_region="x") == (
        None,
        "x",
    )
    assert endpoint_and_region(endpoint="b.vpce-1.s3.eu-west-1.vpce.amazonaws.com")[0].startswith(
        "https://b.vpc"
    )
    assert endpoint_and_region(endpoint_region="sdk") == (None, None)


class RemoteSession:
    """As of Spark Connect: settings, and no JVM. Newer servers redact secrets."""

    class conf:
        getAll = {  # noqa: RUF012
            "spark.hadoop.fs.s3a.access.key": "AK",
            "spark.hadoop.fs.s3a.secret.key": "s3cret",
            "spark.hadoop.fs.s3a.bucket.lake.endpoint": "http://lake",
            "fs.s3a.access.key": "AK-set-later",
            "spark.hadoop.fs.s3a.threads.max": "9",
            "spark.app.name": "x",
        }


def test_settings_are_read_from_a_session_without_a_jvm():
    settings = settings_of(RemoteSession())
    assert set(settings.values) == {"access.key", "secret.key", "bucket.lake.endpoint"}
    given = {"store": "s3://lake", "tier": "cold", "subscribe": "t"}
    options = parse_options(given, streaming=False, s3a=settings)
    assert options.access.s3.access_key_id == "AK-set-later"
    assert options.access.s3.secret_access_key == "s3cret"
    assert options.access.s3.endpoint == "http://lake"
    assert "s3cret" not in repr(options) + repr(settings) + str(settings)
