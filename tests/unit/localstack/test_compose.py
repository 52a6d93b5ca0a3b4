"""Properties of the compose files that need no container engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "localstack"
FILES = ["compose.yaml", "compose.localstack.yaml"]


@pytest.fixture(params=FILES)
def services(request: pytest.FixtureRequest) -> dict[str, dict]:
    return yaml.safe_load((FOLDER / request.param).read_text())["services"]


def test_ports_are_published_on_loopback_only(services: dict[str, dict]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned(services: dict[str, dict]) -> None:
    for service in services.values():
        tag = service["image"].rpartition(":")[2]
        assert tag == "dev" or tag[-1].isdigit(), service["image"]


def test_the_broker_starts_after_the_bucket_and_the_bucket_after_a_healthy_server(
    services: dict[str, dict],
) -> None:
    assert "healthcheck" in services["s3"]
    assert "healthcheck" in services["broker"]
    assert services["bucket"]["depends_on"]["s3"]["condition"] == "service_healthy"
    waits = services["broker"]["depends_on"]["bucket"]["condition"]
    assert waits == "service_completed_successfully"


def test_copied_files_are_in_the_build_context() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    for name in ("ready.py", "s3_server.py"):
        assert f"!localstack/{name}" in ignored
        assert (FOLDER / name).exists()
