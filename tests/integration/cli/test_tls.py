"""`tierlog serve --tls-cert --tls-key`, and clients with `--ca-file`."""

import asyncio
import json
import socket
import ssl
import subprocess
from contextlib import suppress

import httpx2
import pytest

import tierlog
from tests.fakes.certificate import make_certificate, needs_openssl
from tests.fakes.command_line import Program, RunningBroker

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """(URL of a broker under TLS, its certificate)."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    broker = RunningBroker(
        *("serve", "--listen", "127.0.0.1:0"),
        *("--data-dir", folder / "data", "--store", (folder / "bucket").as_uri()),
        *("--tls-cert", certificate, "--tls-key", key),
        cwd=folder,
    )
    try:
        yield broker.server, certificate
    finally:
        assert broker.stop() == 0


def test_the_wrong_scheme_is_explained(secured, tmp_path):
    url, _ = secured
    error = Program(url.replace("https", "http")).fails(1, "topic", "list")
    assert "if the server uses TLS, its address begins with https://" in error
    assert "tierlog dev" not in error, "a broker is running"
    plain = RunningBroker("dev", "--data-dir", tmp_path / "data", "--port", "0", cwd=tmp_path)
    try:
        error = Program(plain.server.replace("http", "https")).fails(1, "topic", "list")
    finally:
        assert plain.stop() == 0
    assert "if the server does not use TLS, its address begins with http://" in error
    assert "tierlog dev" not in error


def test_the_command_line_trusts_a_private_ca(secured):
    url, certificate = secured
    program = Program(url)
    program.environment["TIERLOG_CA_FILE"] = str(certificate)
    program.ok("topic", "create", "t")
    program.ok("produce", "t", stdin=b"".join(b"%06d\n" % n for n in range(20_000)))
    assert program.ok("consume", "t").count(b"\n") == 20_000
    program.ok("storage", "offload", "t")
    shown = json.loads(program.ok("group", "set", "g", "t:0=5"))
    assert shown["offsets"][0]["lag"] == 19_995


def test_clients_trust_a_private_ca(secured):
    url, certificate = secured
    with tierlog.Client(url, ca_file=certificate) as client:
        client.create_topic("c", config={"segment.bytes": 4 << 20})
        values = [bytes([n % 256]) * 100_000 for n in range(60)]
        for start in range(0, 60, 6):
            client.produce_encoded("c", values[start : start + 6], partition=0)
        assert [record.value for record in client.consume("c")] == values
        for segment in client.segments("c", 0):
            path = f"{url}/v1/topics/c/partitions/0/segments/{segment.base_offset}"
            whole = httpx2.get(path, verify=_tls_context(certificate), trust_env=False)
            assert len(whole.content) == segment.size_bytes

    async def run():
        async with tierlog.AsyncClient(url, ca_file=certificate) as client:
            return [record.value async for record in client.consume("c", offset=55)]

    assert asyncio.run(run()) == values[55:]


def _tls_context(certificate):
    return ssl.create_default_context(cafile=str(certificate))


def test_an_untrusted_certificate_is_explained(secured, tmp_path):
    url, _ = secured
    error = Program(url).fails(1, "topic", "list")
    assert "certificate" in error.lower()
    assert "give --ca-file" in error
    other, _ = make_certificate(tmp_path, "other")
    assert "certificate" in Program(url).fails(1, "topic", "list", "--ca-file", other).lower()
    assert "nowhere.pem" in Program(url).fails(2, "topic", "list", "--ca-file", "nowhere.pem")


def test_plain_http_on_a_tls_port_is_rejected(secured):
    url, certificate = secured
    host, port = url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sock.settimeout(10)
        with suppress(ConnectionResetError):
            assert b"alive" not in sock.recv(1000)
    with tierlog.Client(url, ca_file=certificate) as client:
        assert client.is_alive()


@pytest.mark.parametrize("which", ["missing", "garbage", "mismatch", "passphrase"])
def test_an_unusable_certificate_is_one_line(tmp_path, which):
    certificate, key = make_certificate(tmp_path)
    if which == "missing":
        key.unlink()
    elif which == "garbage":
        certificate.write_text("no certificate")
    elif which == "passphrase":
        encrypt = ("openssl", "ec", "-aes256", "-passout", "pass:word", "-in", key, "-out", key)
        subprocess.run(encrypt, check=True, capture_output=True)
    else:
        _, key = make_certificate(tmp_path, "other")
    error = Program().fails(
        1,
        *("serve", "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0"),
        *("--tls-cert", certificate, "--tls-key", key),
    )
    assert "tls" in error.lower()
    assert ("passphrase" in error) == (which == "passphrase")
