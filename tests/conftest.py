"""Distribution of tests over workers (`make test`): tests that share something slow to start stay
on one worker, and so do the tests of one file. What Hypothesis may fail for, and where brokers' log
lines go.
"""

from __future__ import annotations

import gc
import os
import ssl
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpcore2
import pytest
import structlog
from botocore.loaders import JSONFileLoader
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

import tierlog
from tests.fakes.flush import check_file
from tierlog.host.page_cache import is_resident

LONGEST = "tests/integration/spark/"
SHARED = (LONGEST, "tests/integration/kafka/", "tests/integration/console/")
"""One Spark session, one Kafka from Maven, one browser."""

ROOMS = {path.name for path in Path(tierlog.__file__).parent.iterdir() if path.is_symlink()}

# jsonschema, which others import, would build grammars of IRIs in each worker, in 2.5 s.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# How fast the machine is fails no test; a failing example is printed with the decorator that
# reproduces it. Before the tests are imported: `@given` takes the settings of that moment.
settings.register_profile(
    "tierlog",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    database=None,
)
settings.load_profile("tierlog")


class CapturedStdout:
    """stdout while pytest captures it, so that a failed test shows the log.

    What a shared broker logs between tests is dropped: it would clutter pytest's own output.
    """

    def write(self, text: str) -> None:
        if sys.stdout is not sys.__stdout__:
            sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


@pytest.fixture(autouse=True, scope="session")
def no_bare_rooms() -> Iterator[None]:
    """The root of a checkout is on the path: a room imported by its bare name would be a second
    copy, with types and caches of its own.
    """
    yield
    bare = {name for name in sys.modules if name.partition(".")[0] in ROOMS}
    assert not bare, f"import these as tierlog.…: {sorted(bare)}"


@pytest.fixture(autouse=True, scope="session")
def cached_s3_service_model() -> Iterator[None]:
    """botocore parses its service model of S3 for each opened store, which takes 0.15 s."""
    parsed = cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: parsed(path))
        yield


@pytest.fixture(autouse=True, scope="session")
def cached_authorities() -> Iterator[None]:
    """httpx2 reads the system's authorities for each client, which takes 40 ms."""
    read = httpcore2.default_ssl_context

    @cache
    def read_once(trust_env: bool, *named: str | None) -> ssl.SSLContext:
        return read(_trust_env=trust_env)

    def authorities(*, _trust_env: bool = True) -> ssl.SSLContext:
        return read_once(_trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", authorities)
        yield


@pytest.fixture(autouse=True, scope="session")
def flushes_at_no_cost() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check_file)
        if hasattr(os, "fdatasync"):
            patch.setattr(os, "fdatasync", check_file)
        yield


@pytest.fixture
def nowait_reads(tmp_path: Path) -> None:
    """For tests of reads that never block: tmpfs, which some systems have on /tmp, has none."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"1")
    with probe.open("rb") as file:
        if not is_resident(file.fileno(), 0, 1):
            pytest.skip("no RWF_NOWAIT on this system, or not on the file system of the tests")


def pytest_configure(config: pytest.Config) -> None:
    # boto3, curl and other clients would use a proxy for servers on this machine.
    os.environ["no_proxy"] = "127.0.0.1,localhost"
    if config.getoption("capture") != "no":
        factory = structlog.PrintLoggerFactory(CapturedStdout())  # type: ignore[arg-type]
        structlog.configure(logger_factory=factory)


class SharedFoldersAndFiles(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return next((folder for folder in SHARED if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFoldersAndFiles:
    return SharedFoldersAndFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The worker with the longest folder starts with it."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look for garbage in it would double its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
