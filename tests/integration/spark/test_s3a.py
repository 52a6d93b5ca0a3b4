"""Credentials and endpoint from the session's S3A settings, with S3 servers that check them."""

import contextlib
import io
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from pyspark_tierlog import DefaultSource, register
from tests.fakes.named_s3 import named_s3
from tests.fakes.two_tiers import two_tiers
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.spark_reader.jobs.verify import verify
from tierlog.spark_reader.s3a import settings_of

pytestmark = pytest.mark.spark

ACCESS_KEY, TOKEN = "AKguarded", "a session token"


class Server(NamedTuple):
    endpoint: str
    access_key: str
    secret_key: str
    token: str
    bucket: str = "lake"

    @property
    def store(self):
        return f"s3://{self.bucket}/spark"


@pytest.fixture
def small(tmp_path):
    """A few segments of topic `t`, all cold but the last."""
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 600)
        tiers.offload("t")
        yield tiers


class CheckingServer:
    """moto behind a check of credentials, which it does not do itself, in headers and URLs."""

    def __init__(self):
        self._app = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ, start_response):
        credentials = environ.get("HTTP_AUTHORIZATION", "") + unquote(environ["QUERY_STRING"])
        in_url = parse_qs(environ["QUERY_STRING"]).get("X-Amz-Security-Token", [""])
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN", in_url[0])
        if f"Credential={ACCESS_KEY}/" in credentials and token == TOKEN:
            return self._app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>InvalidAccessKeyId</Code><Message>no</Message></Error>"]


@pytest.fixture
def moto(small):
    server = make_server("127.0.0.1", 0, CheckingServer(), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        found = Server(f"http://127.0.0.1:{server.port}", ACCESS_KEY, "hunter3", TOKEN)
        with contextlib.closing(client_of(found)) as client:
            client.create_bucket(Bucket=found.bucket)
        fill(found, small)
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def real(small):
    """The server that the environment names."""
    s3 = named_s3()
    found = Server(
        s3["ENDPOINT"], s3["ACCESS_KEY"], s3["SECRET_KEY"], token="", bucket=s3["BUCKET"]
    )
    stranger = client_of(found._replace(access_key="AKIDoesNotExist"))
    with contextlib.closing(stranger), contextlib.suppress(ClientError):
        stranger.list_objects_v2(Bucket=found.bucket)
        pytest.skip("LocalStack accepts any key")
    fill(found, small)
    return found


def client_of(server):
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        aws_session_token=server.token or None,
    )


def fill(server, tiers):
    """Copy the local bucket to the server, under the same keys."""
    options = S3Options(
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        session_token=server.token or None,
    )
    store = open_store(server.store, options)
    folder = Path(tiers.store_url.removeprefix("file://"))
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    store.close()


@pytest.fixture
def settings(spark, monkeypatch):
    """Set S3A settings of the session and register the source; undone at the end."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    names = []

    def apply(**values):
        for name, value in values.items():
            names.append(f"fs.s3a.{name.replace('_', '.')}")
            spark.conf.set(names[-1], value)
        register(spark)

    yield apply
    for name in names:
        spark.conf.unset(name)
    spark.dataSource.register(DefaultSource)


@pytest.mark.parametrize(
    "path_setting",
    [
        "hadoop.security.credential.provider.path",
        "fs.s3a.security.credential.provider.path",
        "fs.s3a.bucket.lake.security.credential.provider.path",
    ],
)
def test_secrets_of_a_bucket_may_be_in_a_credential_provider(spark, tmp_path, path_setting):
    path = f"localjceks://file{tmp_path}/keys.jceks"
    for name in ("access.key", "secret.key", "bucket.lake.access.key", "bucket.lake.secret.key"):
        create_credential(spark, path, name=f"fs.s3a.{name}", value=f"value of {name}")
    spark.conf.set(path_setting, path)
    try:
        found = settings_of(spark)
    finally:
        spark.conf.unset(path_setting)
    for bucket, prefix in (("lake", "bucket.lake."), ("other", "")):
        used = found.complete(S3Options(), f"s3://{bucket}")
        if bucket == "other" and "bucket.lake" in path_setting:
            assert used.access_key_id != "value of access.key"
            continue
        assert used.access_key_id == f"value of {prefix}access.key"
        assert used.secret_access_key == f"value of {prefix}secret.key"


def create_credential(spark, path, *, name, value):
    """As `hadoop credential create` does."""
    jvm, given = spark._jvm, ("create", name, "-value", value, "-provider", path)
    arguments = spark.sparkContext._gateway.new_array(jvm.java.lang.String, len(given))
    for number, one in enumerate(given):
        arguments[number] = one
    shell = jvm.org.apache.hadoop.security.alias.CredentialShell()
    configuration = jvm.org.apache.hadoop.conf.Configuration()
    assert jvm.org.apache.hadoop.util.ToolRunner.run(configuration, shell, arguments) == 0


@pytest.mark.parametrize("server", ["moto", pytest.param("real", marks=pytest.mark.s3)])
def test_s3a_settings_of_the_session_are_used_and_never_shown(
    server, spark, small, settings, request
):
    server = request.getfixturevalue(server)
    cold = small.cold_end("t", 0)
    options = {"store": server.store, "subscribe": "t", "tier": "cold"}
    read = spark.read.format("tierlog").options(**options)
    settings(
        access_key="AKIDoesNotExist",
        secret_key="hunter2",
        connection_ssl_enabled="false",
        path_style_access="true",
        endpoint_region="us-east-1",
        endpoint=server.endpoint.removeprefix("http://"),
    )
    with pytest.raises(Exception, match="does not know the access key") as caught:
        read.load().count()
    assert "hunter2" not in str(caught.value)

    bucket_settings = {
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "session_token": server.token,
    }
    settings(**{f"bucket_{server.bucket}_{name}": value for name, value in bucket_settings.items()})
    frame = read.load()
    assert frame.count() == cold
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        frame.explain(mode="extended")
    assert not any(one in output.getvalue() for one in (server.secret_key, server.token) if one)
    # A job plans in the driver process, and its tasks do not use the data source.
    report = verify(spark, options, clock=lambda: 0)
    assert (report.problems, report.checked.records) == ([], cold)
