"""Properties of the compose files that need no container engine."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fakes.command_line import ROOT
from tests.fakes.tools import find_program
from tierlog.setting_table import TABLE

WATCHED = ROOT / "deploy/compose/compose.yaml"
CLUSTER = ROOT / "deploy/compose/cluster.yaml"
FILES = [WATCHED, CLUSTER, ROOT / "localstack/compose.localstack.yaml"]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def file(request):
    return request.param


@pytest.fixture
def services(file):
    return yaml.safe_load(file.read_text())["services"]


def test_ports_are_published_on_loopback_only(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned(services):
    for service in services.values():
        tag = service["image"].rpartition(":")[2]
        assert tag == "dev" or tag[-1].isdigit(), service["image"]


def test_the_broker_starts_after_the_bucket_and_the_bucket_after_a_healthy_server(services):
    assert "healthcheck" in services["s3"]
    assert services["bucket"]["depends_on"]["s3"]["condition"] == "service_healthy"
    brokers = [one for name, one in services.items() if name.startswith("broker")]
    assert brokers
    for broker in brokers:
        assert "healthcheck" in broker
        waits = broker["depends_on"]["bucket"]["condition"]
        assert waits == "service_completed_successfully"


def test_three_brokers_have_numbers_names_ports_and_volumes_of_their_own():
    services = yaml.safe_load(CLUSTER.read_text())["services"]
    brokers = {name: one for name, one in services.items() if name.startswith("broker")}
    assert len(brokers) == 3
    for name, one in brokers.items():
        given = one["environment"]
        assert name == f"broker-{given['TIERLOG_NODE_ID']}"
        assert given["TIERLOG_ADVERTISED_URL"] == f"http://{name}:8640"
        kafka = given["TIERLOG_KAFKA_ADVERTISED"]
        assert f"{kafka}:9092" in one["ports"], "a client is told what is published"
        variables = {key for key in given if key.startswith("TIERLOG_")}
        assert variables <= {row.variable for row in TABLE}
    for field in ("ports", "volumes"):
        every = [item for one in brokers.values() for item in one[field]]
        assert len(every) == len(set(every))


def test_built_and_mounted_files_are_there(file, services):
    for service in services.values():
        if build := service.get("build"):
            assert (file.parent / build["context"] / build["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            if (source := volume.partition(":")[0]).startswith("."):
                assert (file.parent / source).is_file(), volume


def test_prometheus_and_grafana_are_given_what_they_name():
    services = yaml.safe_load(WATCHED.read_text())["services"]
    given = {path for service in services.values() for path in targets_of(service)}
    prometheus = yaml.safe_load((WATCHED.parent / "prometheus.yaml").read_text())
    assert set(prometheus["rule_files"]) <= given
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert f"--listen=0.0.0.0:{port}" in services[host]["command"]
    boards = yaml.safe_load((WATCHED.parent / "grafana/dashboards.yaml").read_text())
    folder = Path(boards["providers"][0]["options"]["path"])
    assert any(Path(path).parent == folder for path in given)
    (source,) = yaml.safe_load((WATCHED.parent / "grafana/datasource.yaml").read_text())[
        "datasources"
    ]
    assert source["url"].removeprefix("http://").partition(":")[0] in services


def test_prometheus_itself_accepts_its_configuration_and_our_alerts(tmp_path):
    promtool = find_program("promtool")
    shutil.copy(ROOT / "docs/grafana/alerts.yaml", tmp_path)
    configuration = (WATCHED.parent / "prometheus.yaml").read_text()
    (tmp_path / "prometheus.yaml").write_text(configuration.replace("/etc/prometheus", "."))
    command = [promtool, "check", "config", tmp_path / "prometheus.yaml"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def targets_of(service):
    return [volume.split(":")[1] for volume in service.get("volumes", [])]


def test_containers_of_ours_are_read_only_and_without_capabilities():
    services = yaml.safe_load(WATCHED.read_text())["services"]
    for name in ("bucket", "broker", "prometheus", "grafana"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
