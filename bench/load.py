"""Load by wrk: one thread, a few connections, all requests from a list prepared beforehand.

wrk counts the responses, the kernel the server's CPU. An unsuccessful response fails the run: a
refusal is fast, and would look like a good figure.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from bench.children import Server, program
from bench.rounds import cpu_seconds_of
from bench.wire import Wire

_SCRIPT: Final = """
local requests, number = {}, 0
local body = nil
function init(args)
  if args[2] then
    local file = io.open(args[2], "rb"); body = file:read("*a"); file:close()
  end
  for line in io.lines(args[1]) do
    local method, path, rest = line:match("^(%S+) (%S+)%s?(.*)$")
    local headers = {}
    for name, value in rest:gmatch("([%w-]+)=(%S+)") do headers[name] = value end
    requests[#requests + 1] = wrk.format(method, path, headers, body)
  end
end
function request()
  number = number % #requests + 1
  return requests[number]
end
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "bytes": %d, "duration_us": %d, "refused": %d, "broken": %d, ' ..
    '"p50_us": %d, "p99_us": %d}\\n',
    summary.requests, summary.bytes, summary.duration, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


class Load(NamedTuple):
    """The figures of one run of wrk. `cpu_s` is the server's."""

    requests: int
    bytes: int
    duration_s: float
    cpu_s: float
    p50_ms: float
    p99_ms: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.duration_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / 1e9)


class Requests(NamedTuple):
    """Lines `METHOD PATH NAME=VALUE…`, sent in turn, and the body of all of them."""

    lines: Sequence[str]
    body: Path | None = None


def run(
    server: Server,
    requests: Requests,
    *,
    folder: Path,
    duration_s: int,
    connections: int = 8,
) -> Load:
    """Send for `duration_s`. Raises MissingPeer without wrk, RuntimeError if a request fails."""
    script, listed = folder / "load.lua", folder / "requests.txt"
    script.write_text(_SCRIPT)
    listed.write_text("".join(f"{line}\n" for line in requests.lines))
    command = [program("wrk"), "-t1", f"-c{connections}", f"-d{duration_s}s", "--timeout", "30s"]
    command += ["-s", str(script), server.url, "--", str(listed)]
    command += [str(requests.body)] if requests.body else []
    cpu_before = cpu_seconds_of(server.pid)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    cpu_s = cpu_seconds_of(server.pid) - cpu_before
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return _load(json.loads(line.removeprefix("RESULT ")), cpu_s)
    raise RuntimeError(f"wrk failed: {done.stdout}{done.stderr}")


def beside(
    server: Server, request: bytes, run_load: Callable[[], Load], *, after_s: float, for_s: float
) -> tuple[list[float], Load]:
    """Milliseconds of requests sent in turn, from `after_s` into a load on, and that load. Raises
    what the load raises.
    """
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(run_load)
        time.sleep(after_s)
        return timed(server, request, for_s=for_s), load.result()


def timed(server: Server, request: bytes, *, for_s: float) -> list[float]:
    """Milliseconds of a request that is sent again and again, with short pauses."""
    seen, until = [], time.monotonic() + for_s
    with Wire(server) as wire:
        while time.monotonic() < until:
            seen.append(wire.timed(request).seconds * 1000)
            time.sleep(0.002)
    return seen


def _load(seen: dict[str, int], cpu_s: float) -> Load:
    if seen["refused"] or seen["broken"] or not seen["requests"]:
        raise RuntimeError(f"not every request succeeded: {seen}")
    return Load(
        requests=seen["requests"],
        bytes=seen["bytes"],
        duration_s=seen["duration_us"] / 1e6,
        cpu_s=cpu_s,
        p50_ms=seen["p50_us"] / 1000,
        p99_ms=seen["p99_us"] / 1000,
    )
