"""The chart: what helm makes of it, against Kubernetes' schemas of the oldest and a new version."""

import subprocess

import pytest
import yaml

import tierlog
from tests.fakes.command_line import ROOT
from tests.fakes.tools import find_program

CHART = ROOT / "deploy/helm/tierlog"
KUBERNETES = ("1.25.0", "1.34.0")
NEEDED = ("store=s3://bucket/prefix", "anonymous=true")
ALL = (
    "store=s3://bucket/prefix",
    "tokens.secret=tokens",
    "credentialsSecret=keys",
    "networkPolicy.enabled=true",
    "settings.AWS_REGION=eu-central-1",
    "settings.TIERLOG_S3_PATH_STYLE=true",
    "volume.storageClassName=fast",
    "serviceAccount.annotations.role=arn",
    "nodeSelector.disk=ssd",
    "imagePullSecrets[0].name=registry",
)


def helm(*arguments, values=NEEDED):
    settings = [part for value in values for part in ("--set", value)]
    return subprocess.run(
        [find_program("helm"), *arguments, *settings], check=False, capture_output=True, text=True
    )


def rendered(version, values):
    done = helm("template", "logs", CHART, "--kube-version", version, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("values", [NEEDED, ALL], ids=["least", "all"])
def test_helm_lint_finds_nothing(values):
    done = helm("lint", "--strict", CHART, values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [NEEDED, ALL], ids=["least", "all"])
def test_kubernetes_admits_every_document(version, values):
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = list(yaml.safe_load_all(rendered(version, values)))
    assert {one["kind"] for one in documents} >= {"StatefulSet", "Service", "ServiceAccount"}
    for document in documents:
        validate(document, version.rpartition(".")[0], strict=True)


def test_a_document_with_an_unknown_field_would_be_found():
    package = pytest.importorskip("kubernetes_validate")
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": {"replicas": 1}}
    with pytest.raises(package.ValidationError):
        package.validate(wrong, "1.34", strict=True)


def test_the_pod_may_do_no_more_than_it_needs():
    documents = list(yaml.safe_load_all(rendered(KUBERNETES[-1], ALL)))
    (broker,) = (one for one in documents if one["kind"] == "StatefulSet")
    pod = broker["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {
        container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness")
    } == {"/readyz"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert "TIERLOG_INSECURE_NO_AUTH" not in {one["name"] for one in container["env"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("anonymous=true",), "store is needed"),
        (("store=s3://b/p",), "tokens.secret is needed, or anonymous=true"),
        ((*NEEDED, "replicas=2"), "replicas"),
        ((*NEEDED, "volume.size=large"), "size"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, said):
    done = helm("template", "logs", CHART, "--kube-version", KUBERNETES[-1], values=values)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_chart_has_the_version_of_its_broker():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == tierlog.__version__
