"""A real S3 server on this machine, without Docker: install it, start it, make the bucket.

    python localstack/s3_server.py [--minio | --localstack] [--port N] [--exec CMD ...]

* Run by path, with the project's Python. This folder is no package on purpose: it would shadow the
  `localstack` of LocalStack itself, which therefore runs in an environment and a folder of its own.
* Nothing listens on anything but 127.0.0.1. The keys are for development and printed.
* Versions are pinned; what was built or installed is kept under `.cache/s3/<server>-<version>/`,
  objects under `.cache/s3/data/`. With `--exec` objects live in a temporary folder and go with the
  command.
* Only the process that this file started is ever stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

HOST = "127.0.0.1"
DEFAULT_PORT = 9710
ACCESS_KEY, SECRET_KEY, REGION = "tierlog", "tierlog-secret", "us-east-1"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "s3"
READY_S, STOP_S = 90.0, 10.0

VERSITYGW = "v1.8.0"
MINIO = "v0.0.0-20260212201848-7aac2a2c5b7c"
LOCALSTACK = "4.13.1"
# Later releases of these break that LocalStack.
LOCALSTACK_PINS = ("cbor2<5.8", "pyOpenSSL<25.2", "cryptography<46", "service_identity<25")


class Failure(Exception):
    """Said in one line on stderr; exit 1."""


class Server(NamedTuple):
    """How to run one kind: `install` gives the program, `command` starts it on (port, folder)."""

    name: str
    version: str
    install: Callable[[Path], Path]
    command: Callable[[Path, int, Path], list[str]]
    environment: Callable[[int, Path], Mapping[str, str]]
    note: str = ""
    keeps: bool = True  # objects outlive the process


def go_install(package: str, version: str) -> Callable[[Path], Path]:
    """An installer that builds a Go program into the folder it is given, once."""

    def install(folder: Path) -> Path:
        program = folder / package.rpartition("/")[2]
        if program.exists():
            return program
        if (go := shutil.which("go")) is None:
            raise Failure(f"{package} is built with Go, and there is no go on the PATH")
        say(f"building {package}@{version}; once, it takes some minutes")
        folder.mkdir(parents=True, exist_ok=True)
        run_command(
            [go, "install", f"{package}@{version}"], env={**os.environ, "GOBIN": str(folder)}
        )
        return program

    return install


def pip_install_localstack(folder: Path) -> Path:
    """LocalStack in an environment of its own. The marker says that the install was completed."""
    python, done = folder / "venv" / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    say(f"installing LocalStack {LOCALSTACK} from PyPI; once, it takes a minute")
    venv.create(folder / "venv", with_pip=True, clear=True)
    wanted = [f"localstack-core[base-runtime]=={LOCALSTACK}", *LOCALSTACK_PINS]
    quiet = ["--quiet", "--disable-pip-version-check"]
    run_command([str(python), "-m", "pip", "install", *quiet, *wanted], env=os.environ)
    done.touch()
    return python


SERVERS = {
    "versitygw": Server(
        name="versitygw",
        version=VERSITYGW,
        install=go_install("github.com/versity/versitygw/cmd/versitygw", VERSITYGW),
        command=lambda program, port, data: [
            str(program),
            "--port",
            f"{HOST}:{port}",
            "--quiet",
            "posix",
            str(data),
        ],
        environment=lambda _port, _data: {
            "ROOT_ACCESS_KEY": ACCESS_KEY,
            "ROOT_SECRET_KEY": SECRET_KEY,
        },
    ),
    "minio": Server(
        name="minio",
        version=MINIO,
        install=go_install("github.com/minio/minio", MINIO),
        command=lambda program, port, data: [
            str(program),
            "server",
            "--quiet",
            "--address",
            f"{HOST}:{port}",
            str(data),
        ],
        environment=lambda _port, _data: {
            "MINIO_ROOT_USER": ACCESS_KEY,
            "MINIO_ROOT_PASSWORD": SECRET_KEY,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        },
    ),
    "localstack": Server(
        name="localstack",
        version=LOCALSTACK,
        install=pip_install_localstack,
        command=lambda python, _port, _data: [str(python), "-m", "localstack.runtime.main"],
        environment=lambda port, data: {
            "SERVICES": "s3",
            "EAGER_SERVICE_LOADING": "1",
            "GATEWAY_LISTEN": f"{HOST}:{port}",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DISABLE_EVENTS": "1",
            "DNS_ADDRESS": "0",
            "FILESYSTEM_ROOT": str(data),
        },
        note="it keeps objects in memory, and takes any secret: for trying out",
        keeps=False,
    ),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_command(command: list[str], *, env: Mapping[str, str]) -> None:
    ended = subprocess.run(command, env=dict(env), check=False)  # noqa: S603 - our own command
    if ended.returncode != 0:
        raise Failure(f"{shlex.join(command)} ended with {ended.returncode}")


def choose(arguments: argparse.Namespace) -> Server:
    """What was asked for; else versitygw where it is built or can be, else LocalStack."""
    if arguments.minio or arguments.localstack:
        return SERVERS["minio" if arguments.minio else "localstack"]
    server = SERVERS["versitygw"]
    built = (folder_of(server) / "versitygw").exists()
    return server if built or shutil.which("go") else SERVERS["localstack"]


def folder_of(server: Server) -> Path:
    return CACHE / f"{server.name}-{server.version}"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    server: Server, *, port: int, data: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server's endpoint, once it answers, and its process, which is stopped on the way out.
    Raises Failure if it ended before.
    """
    if is_taken(port):
        raise Failure(f"port {port} of {HOST} is taken; choose another with --port")
    program = server.install(folder_of(server))
    data.mkdir(parents=True, exist_ok=True)
    log = folder_of(server) / f"log-{port}.txt"
    environment = {**os.environ, **server.environment(port, data)}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            server.command(program, port, data),
            cwd=data,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours: the server stops after the command
        )
    endpoint = f"http://{HOST}:{port}"
    try:
        wait_until_it_answers(endpoint, process, log)
        yield endpoint, process
        if process.poll() is not None:
            raise Failure(f"the S3 server ended with {process.returncode}; {end_of(log)}")
    finally:
        stop(process)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_until_it_answers(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()  # noqa: S310 - http, ours
            return
        except urllib.error.HTTPError:
            return  # a refusal is an answer
        except OSError:
            time.sleep(0.05)
    raise Failure(f"the S3 server does not answer; {end_of(log)}")


def end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    return "\n  ".join(["the end of its log:", *lines])


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_bucket(endpoint: str, bucket: str) -> None:
    """Create the bucket unless it is there. A server may still refuse just after it answers."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 5}),
    )
    try:
        client.create_bucket(Bucket=bucket)
    except client.exceptions.BucketAlreadyOwnedByYou:
        return
    except (ClientError, BotoCoreError) as problem:
        raise Failure(f"bucket {bucket}: {problem}") from problem


def variables(server: Server, endpoint: str, bucket: str) -> dict[str, str]:
    """What the s3-marked tests, boto3 and `tierlog serve` look for."""
    return {
        "TIERLOG_TEST_S3_SERVER": server.name,
        "TIERLOG_TEST_S3_ENDPOINT": endpoint,
        "TIERLOG_TEST_S3_ACCESS_KEY": ACCESS_KEY,
        "TIERLOG_TEST_S3_SECRET_KEY": SECRET_KEY,
        "TIERLOG_TEST_S3_BUCKET": bucket,
        "TIERLOG_TEST_S3_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
    }


def describe(server: Server, endpoint: str, bucket: str) -> str:
    lines = [
        f"{server.name} {server.version} listens on {endpoint}, bucket {bucket}.",
        *([f"Mind: {server.note}."] if server.note else []),
        "",
        "A broker on it, in another terminal:",
        f"  export AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY}",
        f"  export AWS_REGION={REGION}",
        f"  .venv/bin/tierlog serve --data-dir .tierlog/s3 --store s3://{bucket}/dev \\",
        f"      --s3-endpoint {endpoint}",
        "",
        f"Ctrl-C stops the server; its objects {'stay' if server.keeps else 'go with it'}.",
    ]
    return "\n".join(lines)


def serve(server: Server, arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM, or until the server ends."""
    data = (arguments.data_dir or CACHE / "data" / server.name).resolve()
    port = arguments.port or DEFAULT_PORT
    with running(server, port=port, data=data) as (endpoint, process):
        make_bucket(endpoint, arguments.bucket)
        print(describe(server, endpoint, arguments.bucket), flush=True)
        # Blocked no sooner: what installs the server is ended by a Ctrl-C.
        awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        while process.poll() is None and signal.sigwait(awaited) == signal.SIGCHLD:
            pass  # it ended, or was only paused
    return 0


def execute(server: Server, arguments: argparse.Namespace) -> int:
    """Run a command against the server, and answer with its exit code."""
    with ExitStack() as stack:
        data = arguments.data_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tierlog-s3-"))
        )
        port = arguments.port or free_port()
        endpoint, _ = stack.enter_context(running(server, port=port, data=data.resolve()))
        make_bucket(endpoint, arguments.bucket)
        environment = {**os.environ, **variables(server, endpoint, arguments.bucket)}
        command = subprocess.run(arguments.exec, env=environment, check=False)  # noqa: S603 - asked for
        return command.returncode


def ends_the_program(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)  # so that `finally` runs, and the server is stopped


def parse(argv: list[str] | None) -> argparse.Namespace:
    about = "A real S3 server on this machine, without Docker."
    parser = argparse.ArgumentParser(prog="s3_server.py", description=about)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--minio", action="store_true", help="MinIO, built with Go")
    kind.add_argument("--localstack", action="store_true", help="LocalStack, from PyPI")
    parser.add_argument("--port", type=int, help=f"default {DEFAULT_PORT}; with --exec a free one")
    parser.add_argument("--bucket", default="tierlog")
    parser.add_argument("--data-dir", type=Path, help="where the server keeps its objects")
    parser.add_argument("--install-only", action="store_true", help="install, and nothing more")
    parser.add_argument(
        "--make-bucket",
        metavar="ENDPOINT",
        help="only create the bucket on a server that runs already (the compose files do)",
    )
    parser.add_argument(
        "--exec",
        nargs=argparse.REMAINDER,
        metavar="CMD",
        help="run CMD with TIERLOG_TEST_S3_* and AWS_* set, then stop; the exit code is CMD's",
    )
    arguments = parser.parse_args(argv)
    if arguments.exec is not None and not arguments.exec:
        parser.error("--exec needs a command")
    if arguments.exec and shutil.which(arguments.exec[0]) is None:
        parser.error(f"--exec: there is no command {arguments.exec[0]!r}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    server = choose(arguments)
    # A proxy of the environment is for the world outside, not for this machine.
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{direct},{HOST}" if direct else HOST
    try:
        if arguments.make_bucket:
            make_bucket(arguments.make_bucket, arguments.bucket)
            return 0
        if arguments.install_only:
            print(server.install(folder_of(server)))
            return 0
        signal.signal(signal.SIGTERM, ends_the_program)
        return execute(server, arguments) if arguments.exec else serve(server, arguments)
    except Failure as problem:
        say(f"s3_server: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
