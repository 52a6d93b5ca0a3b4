"""The chart: what helm makes of it, against Kubernetes' schemas of the oldest and a new version."""

import subprocess

import pytest
import yaml

import tierlog
from tests.fakes.command_line import ROOT
from tests.fakes.tools import find_program
from tierlog.setting_table import TABLE

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
SEVERAL = (
    "store=s3://bucket/prefix",
    "replicas=3",
    "cluster.enabled=true",
    "cluster.tokenSecret=brokers",
    "tokens.secret=tokens",
    "tls.secret=certificate",
    "kafka.enabled=true",
    "networkPolicy.enabled=true",
)
BOTH = pytest.mark.parametrize(
    "values", [NEEDED, ALL, SEVERAL], ids=["least", "all", "several brokers"]
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


@BOTH
def test_helm_lint_finds_nothing(values):
    done = helm("lint", "--strict", CHART, values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@BOTH
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


def test_each_of_several_brokers_has_its_number_its_name_and_its_volume():
    documents = list(yaml.safe_load_all(rendered(KUBERNETES[-1], SEVERAL)))
    kinds = {one["kind"]: one for one in documents}
    spec = kinds["StatefulSet"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 3
    assert "${POD_NAME##*-}" in container["command"][-1]
    env = {one["name"]: one.get("value") for one in container["env"]}
    pod = f"$(POD_NAME).{spec['serviceName']}.default.svc"
    assert env["TIERLOG_ADVERTISED_URL"] == f"https://{pod}:8640"
    assert env["TIERLOG_KAFKA_ADVERTISED"] == f"{pod}:9092"
    assert [one["name"] for one in container["env"]].index("POD_NAME") == 0, "others are made of it"
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    named = [env[f"TIERLOG_{one}"] for one in ("TLS_CERT", "CLUSTER_CA_FILE", "CLUSTER_TOKEN_FILE")]
    assert {file.rpartition("/")[0] for file in named} <= mounted
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert len(spec["volumeClaimTemplates"]) == 1
    budget = kinds["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"] == spec["selector"]["matchLabels"]
    headless = next(one for one in documents if one["metadata"]["name"] == spec["serviceName"])
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert {one["name"] for one in headless["spec"]["ports"]} == {"http", "kafka"}


def test_every_setting_that_the_chart_gives_is_one():
    documents = yaml.safe_load_all(rendered(KUBERNETES[-1], SEVERAL))
    (broker,) = (one for one in documents if one["kind"] == "StatefulSet")
    (container,) = broker["spec"]["template"]["spec"]["containers"]
    given = {one["name"] for one in container["env"]} - {"POD_NAME"}
    assert given <= {one.variable for one in TABLE}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("anonymous=true",), "store is needed"),
        (("store=s3://b/p",), "tokens.secret is needed, or anonymous=true"),
        ((*NEEDED, "replicas=2"), "replicas above 1 need cluster.enabled=true"),
        ((*NEEDED, "replicas=0"), "replicas"),
        (
            ("store=s3://b/p", "tokens.secret=t", "cluster.enabled=true"),
            "cluster.tokenSecret is needed",
        ),
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
