"""Brokers that speak to each other over TLS, with a token of their own."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.certificate import make_authority, make_signed, needs_openssl
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tierlog.api.http.cluster.peers import HttpPeers
from tierlog.api.http.server import Tls
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.record_format.errors import ConfigurationError, PeerUnavailable

pytestmark = needs_openssl
HERE = "IP:127.0.0.1"


def tls_of(files: tuple[Path, Path]) -> Tls:
    return Tls(certificate=str(files[0]), key=str(files[1]))


class Secured:
    """Two brokers with tokens and certificates. `ca`: of the authority that signed them."""

    def __init__(self, root: Path) -> None:
        self.root, self.authority = root, make_authority(root)
        self.ca = str(self.authority[0])
        self.tokens: dict[str, str] = {}
        for name, scope, topics in (
            ("brokers", Scope.CLUSTER, ""),
            ("admin", Scope.ADMIN, ""),
            ("reader", Scope.READ, "flights"),
            ("producer", Scope.PRODUCE, "flights"),
        ):
            self.tokens[name] = create_token(
                root / "tokens.json", name, scopes=(scope,), topics=topics, now_ms=1
            )

    def certificate(self, name: str, *, names: str = HERE) -> Tls:
        return tls_of(make_signed(self.authority, name, names=names))

    @contextmanager
    def cluster(self, *tls: Tls | None) -> Iterator[ServedCluster]:
        http = HttpSettings(
            tokens_file=self.root / "tokens.json",
            tokens_required=True,
            client_requests_max=5_000,
            peers_ca_file=self.ca,
        )
        brokers = self.tokens["brokers"]
        with served_cluster(self.root, brokers=2, tls=tls, http=http, peer_token=brokers) as made:
            yield made

    def call(self, served: Served, method: str, path: str, token: str, **rest) -> httpx2.Response:
        context = ssl.create_default_context(cafile=self.ca)
        headers = {"authorization": f"Bearer {self.tokens[token]}"}
        with httpx2.Client(verify=context, headers=headers, timeout=20) as client:
            return client.request(method, served.server.url + path, **rest)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("secured"))


def test_brokers_with_certificates_and_a_token_are_one_cluster(secured: Secured) -> None:
    with secured.cluster(secured.certificate("a"), secured.certificate("b")) as cluster:
        a, b = cluster.brokers
        body = {"name": "flights", "partitions": 2}
        assert secured.call(a, "POST", "/v1/topics", "admin", json=body).status_code == 201
        until(lambda: all(cluster.knows(one, "flights") for one in (a, b)))
        records = "/v1/topics/flights/partitions/{}/records"
        for number in (0, 1):
            for served in (a, b):
                path, sent = records.format(number), {"records": [{"value": "x"}]}
                made = secured.call(served, "POST", path, "producer", json=sent)
                assert made.status_code == 200, made.text
                assert secured.call(served, "POST", path, "reader", json=sent).status_code == 403
                read = secured.call(served, "GET", path, "reader")
                assert read.status_code == 200, read.text
                assert secured.call(served, "GET", path, "producer").status_code == 403
        check_that_the_bucket_is_read_by_the_other(secured, cluster)
        cluster.move("flights", 0, cluster.others("flights", 0)[0])
        leaders = [node_id_of(cluster.leader("flights", number).broker) for number in (0, 1)]

        def leaders_shown() -> list[int | None]:
            described = secured.call(a, "GET", "/v1/topics/flights", "reader").json()
            shown = [one["leader"] for one in described["partitions"]]
            return [one and one["node_id"] for one in shown]

        until(lambda: leaders_shown() == leaders)
        check_what_the_brokers_token_may(secured, a)


def check_that_the_bucket_is_read_by_the_other(secured: Secured, cluster: ServedCluster) -> None:
    """Its leader answers the question where the log ends."""
    other = cluster.others("flights", 0)[0]
    path = "/v1/topics/flights/partitions/0/records"
    done = secured.call(other, "POST", "/v1/topics/flights/offload?wait_ms=20000", "admin")
    assert done.status_code == 200, done.text

    def is_read_there() -> bool:
        shown = secured.call(other, "GET", path, "reader").headers
        names = ("log-tier", "log-leader", "log-high-watermark", "log-up-to-date")
        return [shown.get(name) for name in names] == ["cold", None, "2", "true"]

    until(is_read_there)
    assert secured.call(other, "GET", path, "producer").status_code == 403


def check_what_the_brokers_token_may(secured: Secured, served: Served) -> None:
    assert secured.call(served, "GET", "/v1/cluster/leaders", "brokers").status_code == 200
    for method, path in (
        ("GET", "/v1/topics/flights/partitions/0/records"),
        ("POST", "/v1/topics/flights/partitions/0/records"),
        ("DELETE", "/v1/topics/flights"),
        ("POST", "/v1/cluster/rebalance"),
    ):
        assert secured.call(served, method, path, "brokers").status_code == 403, path
    for who in ("reader", "producer"):
        for method, path in (
            ("GET", "/v1/cluster/leaders"),
            ("POST", "/v1/cluster/news"),
            ("POST", "/v1/cluster/transaction-markers"),
            ("POST", "/v1/cluster/group-configs"),
            ("POST", "/v1/cluster/share-states"),
            ("POST", "/v1/topics/flights/partitions/0/leader"),
        ):
            assert secured.call(served, method, path, who).status_code == 403, path
    forwarded = {"tierlog-forwarded": "0", "authorization": "Bearer nobody"}
    path = served.server.url + "/v1/topics"
    with httpx2.Client(verify=ssl.create_default_context(cafile=secured.ca)) as client:
        assert client.get(path, headers=forwarded).status_code == 401


@pytest.mark.parametrize("wrong", ["another name", "another authority", "no certificate"])
def test_a_broker_without_a_certificate_for_its_name_is_not_spoken_with(
    tmp_path: Path, wrong: str
) -> None:
    secured = Secured(tmp_path)
    tls: Tls | None = secured.certificate("named", names="DNS:elsewhere.example")
    if wrong == "another authority":
        tls = tls_of(make_signed(make_authority(tmp_path, "another"), "signed", names=HERE))
    if wrong == "no certificate":
        tls = None
    with secured.cluster(tls, secured.certificate("right")) as cluster:
        first, second = cluster.brokers
        peers = HttpPeers(token=secured.tokens["brokers"], ca_file=secured.ca)
        assert peers.read_leaders(second.server.url).node_id == node_id_of(second.broker)
        with pytest.raises(PeerUnavailable, match=r"CERTIFICATE_VERIFY_FAILED|not https"):
            peers.read_leaders(first.server.url)
        peers.close()
        cluster_of(second.broker).news.read_reports()
        assert node_id_of(first.broker) not in cluster_of(second.broker).leaders.count_led()


def test_a_file_without_authorities_is_refused_by_name(tmp_path: Path) -> None:
    for file in (tmp_path / "none.pem", tmp_path / "empty.pem"):
        if file.stem == "empty":
            file.write_text("not a certificate")
        with pytest.raises(ConfigurationError, match=r"cluster\.ca\.file .*\.pem"):
            HttpPeers(ca_file=str(file))
