"""Flags over environment over file; every error names the setting, the value and the limit."""

import dataclasses
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tierlog import settings
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.ledger import PriceTable
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.errors import ConfigurationError
from tierlog.setting_kinds import Kind
from tierlog.setting_table import TABLE, Part

DATA = {"data.dir": Path("d")}


def test_flags_take_precedence_over_variables_and_those_over_the_file(tmp_path):
    file = tmp_path / "tierlog.toml"
    file.write_text("[cache]\nbytes = 1\n[gc]\ngrace.ms = 5\n[http]\nrecords.max = 7\n")
    environment = {"TIERLOG_CACHE_BYTES": "2", "TIERLOG_GC_GRACE_MS": "6", "HOME": "/"}
    loaded = settings.load_settings(DATA | {"cache.bytes": "3"}, environment, file)
    assert loaded.broker.cache_bytes == 3
    assert loaded.broker.gc_grace_ms == 6
    assert loaded.http.records_max == 7


def test_a_topic_setting_in_the_file_is_refused_with_a_hint(tmp_path):
    file = tmp_path / "tierlog.toml"
    file.write_text("[offload]\nmax.lag.ms = 60000\n")
    with pytest.raises(ConfigurationError, match="is a topic setting: tierlog topic alter"):
        settings.load_settings(DATA, {}, file)


def test_defaults_are_those_of_the_settings_classes():
    loaded = settings.load_settings(DATA, {}, None)
    assert loaded.broker == BrokerSettings(data_dir=Path("d"))
    assert loaded.http.body_max_bytes == HttpSettings().body_max_bytes
    assert (loaded.host, loaded.port, loaded.store_url) == ("127.0.0.1", 8640, None)


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.name)
def test_every_row_of_the_table_sets_an_existing_field(setting):
    owner = {
        Part.BROKER: BrokerSettings,
        Part.HTTP: HttpSettings,
        Part.STORE: S3Options,
        Part.PRICE: PriceTable,
    }
    if setting.part in owner and setting.name != "store":
        assert setting.field in {field.name for field in dataclasses.fields(owner[setting.part])}
    default = settings.default_of(setting)
    if isinstance(default, int) and not isinstance(default, bool):
        assert setting.least <= default <= setting.most


@pytest.mark.parametrize("setting", [one for one in TABLE if one.kind is Kind.MS])
def test_no_time_is_longer_than_a_thread_can_wait(setting):
    assert setting.most / 1000 <= threading.TIMEOUT_MAX
    for digits in (16, 400):
        with pytest.raises(ConfigurationError, match=re.escape(setting.name)):
            settings.load_settings(DATA | {setting.name: "9" * digits}, {}, None)


def test_every_field_of_the_broker_settings_has_a_row():
    rows = {setting.field for setting in TABLE if setting.part is Part.BROKER}
    assert rows | {"prices", "advertised_kafka"} == {
        field.name for field in dataclasses.fields(BrokerSettings)
    }
    prices = {setting.field for setting in TABLE if setting.part is Part.PRICE}
    assert prices == {field.name for field in dataclasses.fields(PriceTable)}


def test_prices_are_parsed_as_dollars(tmp_path):
    file = tmp_path / "tierlog.toml"
    file.write_text("[price]\nput.per.1000 = 0.01\nstored.per.gb.month = 1\n")
    prices = settings.load_settings(DATA | {"price.get.per.1000": "0.0005"}, {}, file).broker.prices
    assert prices == PriceTable(put_per_1000=0.01, get_per_1000=0.0005, stored_per_gb_month=1.0)
    for bad in ("-1", "nan", "inf", "free"):
        with pytest.raises(ConfigurationError, match="price in dollars"):
            settings.load_settings(DATA | {"price.put.per.1000": bad}, {}, None)


@pytest.mark.parametrize("url", ["file:///srv/bucket", "memory://bucket"])
def test_a_local_store_costs_nothing_by_default(url):
    default = settings.load_settings(DATA | {"store": url}, {}, None).broker.prices
    assert set(dataclasses.astuple(default)) == {0.0}
    configured = settings.load_settings(
        DATA | {"store": url, "price.put.per.1000": "2"}, {}, None
    ).broker.prices
    assert configured == dataclasses.replace(default, put_per_1000=2.0)
    s3 = settings.load_settings(DATA | {"store": "s3://bucket/prefix"}, {}, None).broker.prices
    assert s3 == PriceTable()


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("cache.bytes", "64MiB", 64 << 20),
        ("cache.bytes", "2GB", 2_000_000_000),
        ("gc.grace.ms", "1.5h", 5_400_000),
        ("shutdown.timeout.ms", "2", 2000),
        ("retention.check.interval.ms", "500ms", 500),
    ],
)
def test_sizes_and_durations_may_have_units(name, raw, value):
    loaded = settings.load_settings(DATA | {name: raw}, {}, None)
    assert getattr(loaded.broker, name.replace(".", "_")) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--data-dir"),
        (DATA | {"cache.bytes": "-1"}, "cache.bytes must be between 0"),
        (DATA | {"offload.concurrency": "many"}, "offload.concurrency must be a whole number"),
        (DATA | {"listen": "host:99999"}, "HOST:PORT"),
        (DATA | {"listen": "8640"}, "HOST:PORT, as in 127.0.0.1:8640, not '8640'"),
        (DATA | {"listen": "0.0.0.0:8640"}, "insecure-no-auth"),
        (DATA | {"listen": "example.org:80"}, "insecure-no-auth"),
        (DATA | {"kafka.listen": "0.0.0.0:9092"}, "kafka.listen 0.0.0.0:9092 is not a loopback"),
        (DATA | {"queued.max.request.bytes": "1MiB"}, "socket.request.max.bytes"),
        (DATA | {"default.replication.factor": "3"}, "3.* give --join"),
        (
            DATA | {"cluster.join": "true", "store": "memory://x"},
            "store memory://x is this process's own memory, .* give s3://bucket/prefix or file",
        ),
        (DATA | {"replica.lag.time.max.ms": "100"}, "replica.fetch.wait.max.ms .500. is above"),
    ],
)
def test_an_invalid_value_is_refused_by_name(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        settings.load_settings(flags, {}, None)


def test_an_unknown_variable_is_a_warning_with_the_nearest_name():
    environment = {"TIERLOG_CASHE_BYTES": "1", "TIERLOG_SEVER": "", "TIERLOG_SERVER": "http://b"}
    with capture_logs() as logged:
        loaded = settings.load_settings(DATA, environment, None)
    assert loaded.broker.cache_bytes is None
    assert [(line["log_level"], line["event"]) for line in logged] == [
        ("warning", "TIERLOG_CASHE_BYTES: unknown setting; did you mean 'TIERLOG_CACHE_BYTES'?"),
        ("warning", "TIERLOG_SEVER: unknown setting; did you mean 'TIERLOG_SERVER'?"),
    ]


def test_an_unknown_name_in_the_file_is_refused(tmp_path):
    file = tmp_path / "t.toml"
    file.write_text("cache.size = 1\n")
    with pytest.raises(ConfigurationError, match=r"cache\.size"):
        settings.load_settings(DATA, {}, file)
    file.write_text("cache = [")
    with pytest.raises(ConfigurationError, match=r"t\.toml"):
        settings.load_settings(DATA, {}, file)


def test_a_public_address_is_allowed_with_insecure_no_auth():
    flags = DATA | {"listen": "[::]:9", "insecure.no.auth": True}
    loaded = settings.load_settings(flags, {}, None)
    assert (loaded.host, loaded.port, loaded.http.check_host) == ("::", 9, False)


def test_a_public_address_is_allowed_with_tokens(tmp_path):
    flags = {"data.dir": tmp_path, "listen": "0.0.0.0:9"}
    with pytest.raises(ConfigurationError, match="tierlog token create"):
        settings.load_settings(flags, {}, None)
    (tmp_path / "tierlog").mkdir()
    tokens = tmp_path / "tierlog" / "tokens.json"
    tokens.touch()
    loaded = settings.load_settings(flags, {}, None)
    assert (loaded.http.tokens_file, loaded.http.tokens_required) == (tokens, True)
    assert not settings.load_settings({"data.dir": tmp_path}, {}, None).http.tokens_required


def test_a_configured_tokens_file_must_exist(tmp_path):
    other = tmp_path / "other.json"
    flags = DATA | {"tokens.file": str(other)}
    with pytest.raises(ConfigurationError, match=r"other\.json"):
        settings.load_settings(flags, {}, None)
    other.touch()
    assert settings.load_settings(flags, {}, None).http.tokens_file == other


def test_setting_names_and_flags_are_unique():
    assert len({setting.name for setting in TABLE}) == len(TABLE)
    assert len({setting.flag_name for setting in TABLE}) == len(TABLE)
    assert all(setting.kind is not Kind.SECONDS for setting in TABLE)


def test_the_file_is_utf_8_in_any_locale(tmp_path):
    file = tmp_path / "t.toml"
    file.write_bytes('data.dir = "Müller"'.encode())
    code = """
import sys, warnings
from pathlib import Path
from tierlog import settings
warnings.simplefilter("error", EncodingWarning)
print(ascii(str(settings.load_settings({}, {}, Path(sys.argv[1])).broker.data_dir)))
"""
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", code, file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ascii("Müller") + "\n", done.stderr
