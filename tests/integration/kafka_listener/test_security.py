"""Who may connect: real clients with each mechanism, with and without TLS; and what ends one."""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiokafka
import aiokafka.abc
import confluent_kafka
import kafka
import pytest
import structlog
from kafka.errors import KafkaError
from kafka.net.sasl.oauth import AbstractTokenProvider

from tests.fakes.certificate import make_certificate, needs_openssl
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.http.server import Tls
from tierlog.api.http.settings import HttpSettings
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.api.serving import tokens as tokens_file
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token, revoke_token
from tierlog.record_format.kafka_messages.messages import (
    ApiVersionsRequest,
    CreateAclsRequest,
    DescribeAclsRequest,
    MetadataRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)

MECHANISMS = ["PLAIN", "OAUTHBEARER", "SCRAM-SHA-256", "SCRAM-SHA-512"]
USER = "orders-service"
NAMED = ApiVersionsRequest(client_software_name="t", client_software_version="1")
ALL = MetadataRequest(topics=None)


class Secured(NamedTuple):
    served: Served
    file: Path
    token: str
    certificate: Path | None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.served.kafka_port}"

    def plain(self, name: str, token: str) -> SaslAuthenticateRequest:
        return SaslAuthenticateRequest(auth_bytes=f"\0{name}\0{token}".encode())


@pytest.fixture(params=[False, True], ids=["plaintext", "tls"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Secured]:
    yield from _secured(tmp_path, is_tls=request.param, kafka=KafkaSettings())


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Secured]:
    """Without TLS; a failed attempt is answered at once."""
    settings = KafkaSettings(failed_authentication_delay_ms=0, connections_max_reauth_ms=3_600_000)
    yield from _secured(tmp_path, is_tls=False, kafka=settings)


def _secured(folder: Path, *, is_tls: bool, kafka: KafkaSettings) -> Iterator[Secured]:
    file = folder / "tokens.json"
    scopes = (Scope.READ, Scope.PRODUCE)
    token = create_token(file, USER, scopes=scopes, topics="orders.", now_ms=1)
    certificate, key = make_certificate(folder) if is_tls else (None, None)
    tls = Tls(certificate=str(certificate), key=str(key)) if is_tls else None
    http = HttpSettings(tokens_file=file)
    with (
        pytest.MonkeyPatch.context() as patch,
        served_broker(
            folder / "data",
            http=http,
            tls=tls,
            kafka=kafka,
            group_consumer_heartbeat_interval_ms=100,
        ) as served,
    ):
        patch.setattr(tokens_file, "CHECK_INTERVAL_S", 0.0)
        for topic in "orders.eu", "private":
            served.broker.create_topic(topic)
        yield Secured(served, file, token, certificate)


# --- real clients ---------------------------------------------------------------------------------


class Bearer(AbstractTokenProvider):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def token(self) -> str:
        return self._token


def topics_of_kafka_python(
    secured: Secured, mechanism: str, token: str, *, patience_ms: int = 10_000
) -> set[str]:
    protocol = "SASL_SSL" if secured.certificate else "SASL_PLAINTEXT"
    given: dict[str, Any] = {"sasl_plain_username": USER, "sasl_plain_password": token}
    if mechanism == "OAUTHBEARER":
        given = {"sasl_oauth_token_provider": Bearer(token)}
    if secured.certificate:
        given["ssl_cafile"] = str(secured.certificate)
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=secured.address,
        security_protocol=protocol,
        sasl_mechanism=mechanism,
        bootstrap_timeout_ms=patience_ms,
        **given,
    )
    try:
        return set(consumer.topics())
    finally:
        consumer.close()


def topics_of_librdkafka(secured: Secured, mechanism: str, token: str) -> set[str]:
    protocol = "sasl_ssl" if secured.certificate else "sasl_plaintext"
    given: dict[str, Any] = {"sasl.username": USER, "sasl.password": token}
    failed: list[confluent_kafka.KafkaError] = []
    if mechanism == "OAUTHBEARER":
        given = {"oauth_cb": lambda _: (token, 4e9)}
    if secured.certificate:
        given["ssl.ca.location"] = str(secured.certificate)
    settings = {
        "bootstrap.servers": secured.address,
        "security.protocol": protocol,
        "sasl.mechanisms": mechanism,
        "group.id": "g",
        "error_cb": failed.append,
        **given,
    }
    consumer = confluent_kafka.Consumer(settings)
    try:
        consumer.poll(0)
        return set(consumer.list_topics(timeout=10).topics)
    finally:
        consumer.close()


def topics_of_aiokafka(secured: Secured, mechanism: str, token: str) -> set[str]:
    class Provider(aiokafka.abc.AbstractTokenProvider):
        async def token(self) -> str:
            return token

    async def ask() -> set[str]:
        context = None
        if secured.certificate:
            context = ssl.create_default_context(cafile=str(secured.certificate))
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=secured.address,
            security_protocol="SASL_SSL" if context else "SASL_PLAINTEXT",
            ssl_context=context,
            sasl_mechanism=mechanism,
            sasl_plain_username=USER,
            sasl_plain_password=token,
            sasl_oauth_token_provider=Provider(),
        )
        await consumer.start()
        try:
            return set(await consumer.topics())
        finally:
            await consumer.stop()

    return asyncio.run(ask())


CLIENTS = [topics_of_kafka_python, topics_of_librdkafka, topics_of_aiokafka]


@needs_openssl
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_clients_authenticate_and_see_what_their_token_may_see(
    secured: Secured, mechanism: str
) -> None:
    for topics in CLIENTS:
        assert topics(secured, mechanism, secured.token) == {"orders.eu"}, topics


def test_a_consumer_group_reads_what_its_members_token_may_see(quick: Secured) -> None:
    """By a pattern only that, and by name nothing else."""
    settings = {
        "bootstrap.servers": quick.address,
        "security.protocol": "sasl_plaintext",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": USER,
        "sasl.password": quick.token,
        "group.id": "g",
        "group.protocol": "consumer",
    }
    consumer = confluent_kafka.Consumer(settings)
    try:
        consumer.subscribe(["^.*"])
        until(lambda: consumer.poll(0.02) or consumer.assignment())
        assert [one.topic for one in consumer.assignment()] == ["orders.eu"]
        consumer.subscribe(["private"])

        def is_refused() -> bool:
            message = consumer.poll(0.02)
            error = None if message is None else message.error()
            return error is not None and error.name() == "TOPIC_AUTHORIZATION_FAILED"

        until(is_refused)
    finally:
        consumer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_token_is_refused_and_is_not_in_the_log(quick: Secured, mechanism: str) -> None:
    wrong = quick.token[:-1] + ("a" if quick.token[-1] != "a" else "b")
    with structlog.testing.capture_logs() as logs, pytest.raises(KafkaError):
        topics_of_kafka_python(quick, mechanism, wrong, patience_ms=2000)
    refused = [one for one in logs if one["event"] == "Kafka client is not authenticated"]
    assert refused
    assert refused[0]["client"] == "127.0.0.1"
    assert wrong not in str(logs)


@needs_openssl
def test_records_cross_tls_both_ways(secured: Secured) -> None:
    settings: dict[str, Any] = {
        "bootstrap.servers": secured.address,
        "security.protocol": "sasl_ssl" if secured.certificate else "sasl_plaintext",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": USER,
        "sasl.password": secured.token,
    }
    if secured.certificate:
        settings["ssl.ca.location"] = str(secured.certificate)
    values = [b"%04d" % number * 1000 for number in range(300)]
    producer = confluent_kafka.Producer(settings)
    for value in values:
        producer.produce("orders.eu", value)
    assert producer.flush(20) == 0
    consumer = confluent_kafka.Consumer(settings | {"group.id": "g"})
    consumer.assign([confluent_kafka.TopicPartition("orders.eu", 0, 0)])
    found: list[bytes] = []
    while len(found) < len(values):
        messages = consumer.consume(100, timeout=20)
        assert messages
        found += [message.value() for message in messages if message.error() is None]
    consumer.close()
    assert found == values


# --- frame by frame -------------------------------------------------------------------------------


@pytest.fixture
def connect(quick: Secured) -> Iterator[Callable[[], KafkaCaller]]:
    made: list[KafkaCaller] = []

    def make() -> KafkaCaller:
        made.append(KafkaCaller(quick.served.kafka_port))
        return made[-1]

    yield make
    for one in made:
        one.close()


def log_in(caller: KafkaCaller, request: SaslAuthenticateRequest, mechanism: str = "PLAIN") -> Any:
    assert caller.ask(SaslHandshakeRequest(mechanism=mechanism), 1).error_code == 0
    return caller.ask(request, 2)


def test_before_authentication_only_api_versions_is_answered(
    connect: Callable[[], KafkaCaller],
) -> None:
    caller = connect()
    assert {18, 36} <= {one.api_key for one in caller.ask(NAMED, 4).api_keys}
    caller.send(ALL, 9)
    assert caller.is_closed()
    caller = connect()
    caller.sock.sendall((1 << 20).to_bytes(4, "big"))  # more than such a client needs
    assert caller.is_closed()


def test_the_old_handshake_is_not_served(connect: Callable[[], KafkaCaller]) -> None:
    (served,) = (one for one in connect().ask(NAMED, 4).api_keys if one.api_key == 17)
    assert (served.min_version, served.max_version) == (1, 1)
    caller = connect()
    caller.send(SaslHandshakeRequest(mechanism="PLAIN"), 0)
    assert caller.is_closed()


def test_an_unknown_mechanism_is_told_which_there_are(connect: Callable[[], KafkaCaller]) -> None:
    caller = connect()
    answer = caller.ask(SaslHandshakeRequest(mechanism="GSSAPI"), 1)
    assert (answer.error_code, answer.mechanisms) == (33, MECHANISMS)
    assert caller.is_closed()


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("PLAIN", b""),
        ("PLAIN", b"\0" * 9),
        ("PLAIN", b"\xff\0\xff\0\xff"),
        ("PLAIN", b"other\0orders-service\0TOKEN"),
        ("PLAIN", b"\0someone-else\0TOKEN"),
        ("OAUTHBEARER", b"n,,\1auth=Basic TOKEN\1\1"),
        ("OAUTHBEARER", b"n,a=someone-else,\1auth=Bearer TOKEN\1\1"),
        ("OAUTHBEARER", b"n,,\1\1"),
        ("SCRAM-SHA-256", b"p=tls-unique,,n=orders-service,r=abc"),
        ("SCRAM-SHA-256", b"n,,n=someone-else,r=abc"),
        ("SCRAM-SHA-512", b"\xff"),
    ],
)
def test_what_proves_nothing_is_refused_and_ends_the_connection(
    quick: Secured, connect: Callable[[], KafkaCaller], mechanism: str, message: bytes
) -> None:
    caller = connect()
    sent = message.replace(b"TOKEN", quick.token.encode())
    answer = log_in(caller, SaslAuthenticateRequest(auth_bytes=sent), mechanism)
    assert answer.error_code == 58
    assert answer.error_message.startswith("Authentication failed")
    assert caller.is_closed()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_scram_refuses_a_final_message_that_is_not_the_clients(
    connect: Callable[[], KafkaCaller], number: int
) -> None:
    caller = connect()
    first = SaslAuthenticateRequest(auth_bytes=f"n,,n={USER},r=abc".encode())
    nonce = bytes(log_in(caller, first, "SCRAM-SHA-256").auth_bytes).split(b",")[0]
    last = (b"c=biws,%b,p=AAAA", b"c=biws,r=abc,p=AAAA%.0b", b"c=AAAA,%b,p=AAAA")[number] % nonce
    assert caller.ask(SaslAuthenticateRequest(auth_bytes=last), 2).error_code == 58
    assert caller.is_closed()


def test_a_token_that_is_older_than_scram_says_so(
    quick: Secured, connect: Callable[[], KafkaCaller]
) -> None:
    quick.file.with_name("tokens.json.scram").unlink()
    create_token(quick.file, "new", scopes=(Scope.READ,), now_ms=1)
    caller = connect()
    first = SaslAuthenticateRequest(auth_bytes=f"n,,n={USER},r=abc".encode())
    assert "older" in log_in(caller, first, "SCRAM-SHA-256").error_message
    assert log_in(connect(), quick.plain(USER, quick.token)).error_code == 0


def test_a_revoked_token_ends_its_connections_at_their_next_request(
    quick: Secured, connect: Callable[[], KafkaCaller]
) -> None:
    other = create_token(quick.file, "other", scopes=(Scope.READ,), now_ms=1)
    kept, ended = connect(), connect()
    assert log_in(ended, quick.plain(USER, quick.token)).error_code == 0
    assert log_in(kept, quick.plain("other", other)).error_code == 0
    assert [one.name for one in ended.ask(ALL, 9).topics] == ["orders.eu"]
    revoke_token(quick.file, USER)
    ended.send(ALL, 9)
    assert ended.is_closed()
    assert len(kept.ask(ALL, 9).topics) == 2
    create_token(quick.file, USER, scopes=(Scope.READ,), now_ms=1)  # the same name, another token
    revoke_token(quick.file, "other")
    create_token(quick.file, "other", scopes=(Scope.READ,), now_ms=1)
    kept.send(ALL, 9)
    assert kept.is_closed()


def test_tokens_that_are_made_later_are_required_of_those_who_are_there(tmp_path: Path) -> None:
    http = HttpSettings(tokens_file=tmp_path / "tokens.json")
    with (
        pytest.MonkeyPatch.context() as patch,
        served_broker(tmp_path / "data", http=http, kafka=KafkaSettings()) as served,
        KafkaCaller(served.kafka_port) as caller,
    ):
        patch.setattr(tokens_file, "CHECK_INTERVAL_S", 0.0)
        refused = caller.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        assert refused.error_code == 34  # as Kafka's, of a listener without SASL
        assert caller.ask(ALL, 9).topics == []
        create_token(http.tokens_file, USER, scopes=(Scope.READ,), now_ms=1)
        caller.send(ALL, 9)
        assert caller.is_closed()


def test_a_client_authenticates_again_as_who_it_was(
    quick: Secured, connect: Callable[[], KafkaCaller]
) -> None:
    other = create_token(quick.file, "other", scopes=(Scope.READ,), now_ms=1)
    caller = connect()
    for _ in range(2):
        assert log_in(caller, quick.plain(USER, quick.token)).session_lifetime_ms == 3_600_000
        assert caller.ask(ALL, 9).error_code == 0
    assert log_in(caller, quick.plain("other", other)).error_code == 58
    assert caller.is_closed()
    caller = connect()
    log_in(caller, quick.plain(USER, quick.token))
    caller.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    caller.send(ALL, 9)  # in the middle of it
    assert caller.is_closed()


def test_a_client_that_does_not_authenticate_again_is_ended(tmp_path: Path) -> None:
    settings = KafkaSettings(connections_max_reauth_ms=1)
    for secured in _secured(tmp_path, is_tls=False, kafka=settings):
        with KafkaCaller(secured.served.kafka_port) as caller:
            log_in(caller, secured.plain(USER, secured.token))
            until(lambda: not _is_answered(caller))


def _is_answered(caller: KafkaCaller) -> bool:
    try:
        caller.ask(ALL, 9)
    except (AssertionError, ConnectionError):
        return False
    return True


# --- ACLs -----------------------------------------------------------------------------------------


def described(caller: KafkaCaller, **filters: Any) -> set[tuple[object, ...]]:
    asked = {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    answer = caller.ask(DescribeAclsRequest(**asked | filters), 3)
    assert answer.error_code == 0, answer.error_message
    return {
        (one.resource_type, one.resource_name, one.pattern_type, acl.principal, acl.operation)
        for one in answer.resources
        for acl in one.acls
    }


def test_tokens_are_shown_as_acls_to_who_administers_all(
    quick: Secured, connect: Callable[[], KafkaCaller]
) -> None:
    caller, other = connect(), connect()
    root = create_token(quick.file, "root", scopes=(Scope.ADMIN,), now_ms=1)
    log_in(caller, quick.plain("root", root))
    mine = f"User:{USER}"
    assert described(caller, principal_filter=mine) == {
        (2, "orders.", 4, mine, 3),
        (2, "orders.", 4, mine, 4),
        (3, "*", 3, mine, 3),
        (4, "kafka-cluster", 3, mine, 12),
    }
    applies = {"resource_type_filter": 2, "resource_name_filter": "orders.eu"}
    assert described(caller, **applies, pattern_type_filter=2, operation=3) == {
        (2, "orders.", 4, mine, 3)
    }
    assert described(caller, **applies, pattern_type_filter=3) == set()
    assert len(described(caller)) == 7
    log_in(other, quick.plain(USER, quick.token))
    refused = other.ask(DescribeAclsRequest(resource_type_filter=1, pattern_type_filter=1), 3)
    assert refused.error_code == 31
    made = caller.ask(CreateAclsRequest(creations=[CreateAclsRequest.AclCreation()] * 2), 3)
    assert [(one.error_code, "token" in one.error_message) for one in made.results] == [
        (54, True)
    ] * 2
