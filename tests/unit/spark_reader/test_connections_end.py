"""Clients are kept for the life of a process, and closed at its end."""

import subprocess
import sys
from contextlib import closing

import httpx

import tierlog.client
from cold_tier.retry import OUTAGE_POLICY, READ_POLICY
from cold_tier.s3_options import S3Options
from spark_reader.access import Access, Connections
from tests.fakes.two_tiers import two_tiers
from tierlog.cli.bucket_options import BucketOptions
from tierlog.client import Client

READER = """
import atexit, gc, socket, sys
def still_open():
    found = [one for one in gc.get_objects() if isinstance(one, socket.socket)]
    return sum(one.fileno() >= 0 for one in found)
atexit.register(lambda: print(still_open()))  # registered first, called last
from spark_reader.access import Access, Connections
broker = Connections(Access(store=sys.argv[1], server=sys.argv[2])).broker
assert broker is Connections(Access(store=sys.argv[1], server=sys.argv[2])).broker
broker.list_topics()
assert still_open()
"""


def test_a_process_that_read_leaves_no_connection_open(tmp_path):
    with two_tiers(tmp_path) as tiers:
        command = [sys.executable, "-c", READER, tiers.store_url, tiers.url]
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (told.returncode, told.stdout, told.stderr) == (0, "0\n", "")


def test_the_bucket_is_opened_by_who_would_rather_wait_than_fail():
    access = Access(store="s3://bucket/prefix", s3=S3Options(region="us-east-1"))
    assert Connections(access).store.read_policy is OUTAGE_POLICY
    command = BucketOptions(store="s3://bucket/prefix", region="us-east-1")
    with command.opened() as store:
        assert store.read_policy is OUTAGE_POLICY
    with closing(command.open()) as store:
        assert store.read_policy is READ_POLICY, "a broker's"


def test_a_token_that_was_renewed_is_the_one_of_the_next_task(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "token"

    def answer(request):
        seen.append(request.headers["authorization"])
        is_known = seen[-1] == f"Bearer {file.read_text()}"
        return httpx.Response(200 if is_known else 401, json={"topics": []})

    line = httpx.MockTransport(answer)
    monkeypatch.setattr(tierlog.client, "Client", lambda *a, **k: Client(*a, **k, transport=line))
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
