"""Connections are kept for the life of a process, and closed at its end."""

import subprocess
import sys
from contextlib import closing

import httpx2

import tierlog.client.client
from tests.fakes.two_tiers import two_tiers
from tierlog.cli.options import BucketOptions
from tierlog.client.client import Client
from tierlog.host.retry import OUTAGE_POLICY, READ_POLICY
from tierlog.object_store.s3_connection import S3Options
from tierlog.spark_reader import access as access_module
from tierlog.spark_reader.access import Access, Connections

READER = """
import atexit, gc, socket, sys
def still_open():
    found = [each for each in gc.get_objects() if isinstance(each, socket.socket)]
    return sum(each.fileno() >= 0 for each in found)
atexit.register(lambda: print(still_open()))  # registered first, called last
from tierlog.spark_reader.access import Access, Connections
broker = Connections(Access(store=sys.argv[1], server=sys.argv[2])).broker
assert broker is Connections(Access(store=sys.argv[1], server=sys.argv[2])).broker
broker.list_topics()
assert still_open()
"""


def test_connections_are_closed_at_exit(tmp_path):
    with two_tiers(tmp_path) as tiers:
        command = [sys.executable, "-c", READER, tiers.store_url, tiers.url]
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "0\n", "")


def test_readers_without_a_broker_wait_out_an_outage_of_the_store():
    access = Access(store="s3://bucket/prefix", s3=S3Options(region="us-east-1"))
    assert Connections(access).store.read_policy is OUTAGE_POLICY
    command = BucketOptions(store="s3://bucket/prefix", region="us-east-1")
    with command.opened() as store:
        assert store.read_policy is OUTAGE_POLICY
    with closing(command.open()) as store:
        assert store.read_policy is READ_POLICY, "a broker's"


def test_a_renewed_token_is_used_by_the_next_task(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "token"

    def respond(request):
        seen.append(request.headers["authorization"])
        is_known = seen[-1] == f"Bearer {file.read_text()}"
        return httpx2.Response(200 if is_known else 401, json={"topics": []})

    transport = httpx2.MockTransport(respond)
    monkeypatch.setattr(access_module, "_clients", access_module._Clients())
    monkeypatch.setattr(
        tierlog.client.client, "Client", lambda *a, **k: Client(*a, **k, transport=transport)
    )
    monkeypatch.setenv("TIERLOG_TOKEN_FILE", str(file))
    for access in (
        Access(server="http://127.0.0.1:1", token_file=str(file)),
        Access(server="http://127.0.0.1:1"),
    ):
        for token in ("first", "first", "second"):
            file.write_text(token)
            assert Connections(access).broker.list_topics() == ()
        assert seen == ["Bearer first", "Bearer first", "Bearer first", "Bearer second"]
        seen.clear()
