"""`tierlog dump` of objects, without a broker."""

from dataclasses import replace

import pytest

from tests.fakes.scripted_s3 import Reply, Request, scripted_s3
from tierlog.cli.program import run_command
from tierlog.host import retry
from tierlog.host.retry import OUTAGE_POLICY, READ_POLICY

NAME = "leader-epoch-checkpoint"
CONTENT = b"0\n1\n3 17\n"
OUTAGE = 8  # attempts
assert READ_POLICY.attempts < OUTAGE


class FlakyStore:
    """One object; the first requests of each method are refused."""

    def __init__(self) -> None:
        self.refused = {"HEAD": 0, "GET": 0}

    def __call__(self, request: Request) -> Reply:
        if self.refused[request.method] < OUTAGE:
            self.refused[request.method] += 1
            return Reply(503, "SlowDown")
        if request.method == "HEAD":
            modified = {"Last-Modified": "Sat, 21 Nov 2026 12:00:00 GMT"}
            return Reply(200, body=CONTENT, headers=modified)
        end = len(CONTENT) - 1
        return Reply(206, body=CONTENT, headers={"Content-Range": f"bytes 0-{end}/{end + 1}"})


@pytest.fixture
def _pauses_take_no_time(monkeypatch):
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    policy = replace(OUTAGE_POLICY, monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(retry, "OUTAGE_POLICY", policy)


@pytest.mark.usefixtures("_pauses_take_no_time")
def test_a_dump_of_an_object_rides_out_an_outage(monkeypatch, capsysbinary):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ak")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sk")
    store = FlakyStore()
    with scripted_s3(store) as (endpoint, _):
        named = ("--s3-endpoint", endpoint, "--s3-region", "us-east-1")
        code = run_command(["dump", f"s3://bucket/p/{NAME}", *named])
    assert (code, store.refused) == (0, {"HEAD": OUTAGE, "GET": OUTAGE})
    assert b"epoch: 3 startOffset: 17" in capsysbinary.readouterr().out
