"""`tierlog cluster dev`: several brokers of one folder in one terminal, to be watched and broken.

| file in the folder | what it is                                         |
|--------------------|----------------------------------------------------|
| `bucket/`          | the store, unless `--store` names another          |
| `broker-N/`        | the data folder of broker N                        |
| `broker-N.log`     | what it logs                                       |
| `broker-N.command` | starts it again: of `scripts/break/start-broker.sh`|
| `broker-N.pid`     | its process, whoever started it                    |

* A broker is what its pid file names: one that a script killed, stopped or started is shown, and
  ended at the end, like one that this program started.
* A number in a pid file is believed only if that process has the broker's data folder in its
  command: numbers are used again.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierlog.cli.cluster_view import EVENTS_MAX, Led, Look, Process, Story, picture
from tierlog.cli.output import note
from tierlog.client.client import Client
from tierlog.client.exchange import NO_RETRIES
from tierlog.record_format.errors import ConfigurationError, TierlogError
from tierlog.settings import DEFAULT_PORT, KAFKA_PORT

if TYPE_CHECKING:
    from rich.console import Console

    from tierlog.client.responses import Broker

LOOK_S: Final = 0.5
ASK_S: Final = 1.0  # a broker that is paused answers nothing
START_S: Final = 60.0
STOP_S: Final = 60.0
REPLICAS: Final = 3  # of each partition, unless a topic is created with another number
_KEY: Final = ".command"
_ANYWHERE: Final = "127.0.0.1:0"
_TAKEN: Final = re.compile(r"cannot listen on (\S+):")
_LISTENS: Final = re.compile(r"tierlog listens on (\S+), Kafka clients connect to (\S+),")
# What happens is to be seen at once; a folder costs nothing to ask.
_QUICK: Final = (
    "--heartbeat-interval-ms=500",
    "--session-timeout-ms=2000",
    "--replica-lag-time-max-ms=3000",
    "--rebalance-interval-ms=10000",
)


class DevBroker:
    """One of the lab's. `port` and `kafka_port` are those of its last start unless they are given;
    if another has them when it starts, it has others.
    """

    def __init__(
        self, folder: Path, node_id: int, *, port: int | None = None, kafka_port: int | None = None
    ) -> None:
        self.node_id, self._path = node_id, folder / f"broker-{node_id}"
        self._child: subprocess.Popen[bytes] | None = None
        self._flags: Sequence[str] = ()
        self._log_start = 0
        last = self._last_ports() or (DEFAULT_PORT + node_id, KAFKA_PORT + node_id)
        self._listen = f"127.0.0.1:{port or last[0]}"
        self.kafka = f"127.0.0.1:{kafka_port or last[1]}"
        self.client = self._client()

    @property
    def url(self) -> str:
        return f"http://{self._listen}"

    def _client(self) -> Client:
        return Client(self.url, token="", timeout_s=ASK_S, retries=NO_RETRIES)

    def _file(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    @property
    def log(self) -> Path:
        return self._file(".log")

    def _last_ports(self) -> tuple[int, int] | None:
        with suppress(OSError, ValueError, StopIteration):
            words = shlex.split(self._file(_KEY).read_text())
            found = [
                int(next(word for word in words if word.startswith(flag)).rpartition(":")[2])
                for flag in ("--listen=", "--kafka-listen=")
            ]
            return found[0], found[1]
        return None

    def pid(self) -> int | None:
        """None while it does not run."""
        if self._child is not None:
            self._child.poll()  # one that ended is reaped
        with suppress(OSError, ValueError):
            pid = int(self._file(".pid").read_text())
            if f"{self._path}/" in _command_of(pid):
                return pid
        return None

    def start(self, flags: Sequence[str]) -> None:
        self._flags = flags
        self._write_command()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._child = subprocess.Popen(  # noqa: S603  ourselves
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._file(".pid").write_text(f"{self._child.pid}\n")

    def _write_command(self) -> None:
        self._file(_KEY).write_text(f"exec {shlex.join(self._command())}\n")

    def _command(self) -> list[str]:
        return [
            # -P: modules of the folder in which this was called are not the broker's.
            *(sys.executable, "-P", "-m", "tierlog.cli.main", "serve", "--join"),
            f"--node-id={self.node_id}",
            f"--data-dir={self._path}/",
            f"--listen={self._listen}",
            f"--kafka-listen={self.kafka}",
            *self._flags,
        ]

    def check_started(self) -> bool:
        """Whether it serves. Raises ConfigurationError if it has ended instead."""
        said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        if self._child is not None and self._child.poll() is not None:
            if (taken := _TAKEN.search(said)) is not None and self._listen != _ANYWHERE:
                note(f"{taken[1]} is taken: broker {self.node_id} has other ports")
                self._listen = self.kafka = _ANYWHERE
                self.start(self._flags)
                return False
            lines = said.strip().splitlines()
            raise ConfigurationError(
                f"broker {self.node_id} ended: {lines[-1] if lines else self.log}"
            )
        if (listens := _LISTENS.search(said)) is None:
            return False
        if self._listen == _ANYWHERE:
            self._listen, self.kafka = listens[1].removeprefix("http://"), listens[2]
            self.client.close()
            self.client = self._client()
            self._write_command()
        with suppress(TierlogError):
            return self.client.readiness().ready
        return False

    def sees(self) -> int:
        """How many brokers it takes for alive, itself too."""
        with suppress(TierlogError):
            return sum(one.is_alive for one in self.client.describe_cluster().brokers)
        return 0

    def terminate(self) -> None:
        if (pid := self.pid()) is not None:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # one that is paused would not end

    def kill(self) -> None:
        if (pid := self.pid()) is not None:
            os.kill(pid, signal.SIGKILL)

    def process(self) -> Process:
        return Process(self.node_id, self.url, self.kafka, self.pid())


def _command_of(pid: int) -> str:
    done = subprocess.run(  # noqa: S603
        ["ps", "-ww", "-p", str(pid), "-o", "stat=,command="],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.stdout.startswith("Z") else done.stdout


def run_lab(
    folder: Path, *, brokers: int, store: str | None, port: int | None, kafka_port: int | None
) -> None:
    """Until Ctrl-C. Raises ConfigurationError."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lab = [
        DevBroker(folder, one, port=port and port + one, kafka_port=kafka_port and kafka_port + one)
        for one in range(brokers)
    ]
    if running := [one.node_id for one in lab if one.pid() is not None]:
        raise ConfigurationError(f"{folder}: broker {running[0]} of it runs already")
    flags = [f"--store={store}"] if store else [f"--store={(folder / 'bucket').as_uri()}", *_QUICK]
    flags.append(f"--default-replication-factor={min(brokers, REPLICAS)}")
    with _ended_at_the_end(lab):
        for one in lab:  # one after another: who joins greets those that listen
            note(f"starting broker {one.node_id} ...")
            one.start(flags)
            _wait_until(one.check_started, START_S)
        _wait_until(lambda: all(one.sees() >= brokers for one in lab), START_S)
        _announce(lab, folder)
        _show(lab, folder)


@contextmanager
def _ended_at_the_end(lab: Sequence[DevBroker]) -> Iterator[None]:
    try:
        yield
    finally:
        note("ending the brokers ...")
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not leave some behind
            signal.signal(number, signal.SIG_IGN)
        for one in lab:
            one.terminate()
        _wait_until(lambda: all(one.pid() is None for one in lab), STOP_S)
        for one in lab:
            one.kill()
            one.client.close()


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _announce(lab: Sequence[DevBroker], folder: Path) -> None:
    servers = ",".join(one.url for one in lab)
    kafka = ",".join(one.kafka for one in lab)
    sys.stdout.write(
        f"""
  {len(lab)} brokers, all files in {folder}; Ctrl-C ends them
  export TIERLOG_SERVER={servers}
  Kafka clients: bootstrap.servers={kafka}

  Try, in another terminal:
    tierlog topic create flights --partitions 12
    seq 100000 | tierlog produce flights
    tierlog consume flights --follow
    scripts/break/kill-broker.sh 1 {shlex.quote(str(folder))}
    tierlog topic describe flights
    scripts/break/start-broker.sh 1 {shlex.quote(str(folder))}

"""
    )
    sys.stdout.flush()


def _show(lab: Sequence[DevBroker], folder: Path) -> None:
    """A picture on a terminal; elsewhere a line for all that happens."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_dumb_terminal or not console.is_terminal:
        for _, told in _looks(lab):
            for at, what in told:
                print(f"{at}  {what}", flush=True)
        return
    _draw(lab, folder, console)


def _draw(lab: Sequence[DevBroker], folder: Path, console: Console) -> None:
    from rich.live import Live

    title = f"{len(lab)} brokers in {folder}; Ctrl-C ends them; scripts/break/ kills and starts one"
    events: deque[tuple[str, str]] = deque(maxlen=EVENTS_MAX)
    with Live(console=console, auto_refresh=False) as live:
        for look, told in _looks(lab):
            events.extend(told)
            rows = max(1, console.height - len(lab) - len(events) - 8)
            drawn = picture(look, list(events), title=title, rows=rows, width=console.width)
            live.update(drawn, refresh=True)


def _looks(lab: Sequence[DevBroker]) -> Iterator[tuple[Look, list[tuple[str, str]]]]:
    """Each look, and what has happened since the last, with the time of day."""
    story = Story()
    while True:
        look = look_at(lab)
        at = time.strftime("%H:%M:%S")
        yield look, [(at, what) for what in story.tell(look)]
        time.sleep(LOOK_S)


def look_at(lab: Sequence[DevBroker]) -> Look:
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    known: dict[int, Broker] = {}
    led: dict[tuple[str, int], Led] = {}
    processes = [one.process() for one in lab]
    for one, process in zip(lab, processes, strict=True):
        if process.pid is None:
            continue
        with suppress(TierlogError):
            for place, says in led_by(one).items():
                if place not in led or led[place].epoch < says.epoch:
                    led[place] = says
            if not known:
                topics = one.client.list_topics(internal=True)
                known = {it.node_id: it for it in one.client.describe_cluster().brokers}
                names = {it.topic_id: it.name for it in topics}
                counts = {it.name: it.partitions for it in topics}
    named = {(names[place[0]], place[1]): one for place, one in led.items() if place[0] in names}
    return Look(time.monotonic(), processes, known, counts, named)


def led_by(one: DevBroker) -> dict[tuple[str, int], Led]:
    """By topic id and number. Raises TierlogError."""
    found = one.client.led_partitions()
    sets = {(it.topic_id, it.partition): (*it[2:5], it.has_store) for it in found.sets}
    alone = ((one.node_id,), (one.node_id,), (0,), False)
    return {
        (it.topic_id, it.partition): Led(
            one.node_id, it.leader_epoch, *sets.get((it.topic_id, it.partition), alone)
        )
        for it in found.leaders
    }
