"""The calls that the brokers of a cluster make to each other: `broker.membership.peers` over HTTP.

* A broker shows the cluster's token, which the others' tokens files must have. It goes wherever
  the bucket says that a broker is: over https://, only to who has a certificate for that name, and
  with authorities of the cluster over nothing else.
* A call that is passed on (`gateway`) is not made here: it keeps its client's token.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Sequence
from functools import cache
from typing import Final, TypeVar

import httpx2
import msgspec

from tierlog.api.http.cluster.replica_connections import ReplicaConnections
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.membership.peers import (
    GroupConfigCall,
    LeaderReport,
    Marker,
    Reassigned,
    SchemaCall,
    TransactionPart,
)
from tierlog.broker.replication.messages import FetchedRows, ReplicaFetch
from tierlog.record_format.errors import ConfigurationError, PeerUnavailable
from tierlog.record_format.schema_state import SourceOfId
from tierlog.record_format.share_state import StateAnswer, StateCall
from tierlog.record_format.topic_rules import ConfigValue
from tierlog.record_format.workarounds import decode_json

T = TypeVar("T")
TIMEOUT_S: Final = 5.0
ASSIGNED_S: Final = 0.1  # more, for each partition that the other broker is to open and lead
MOVE_TIMEOUT_S: Final = 360.0  # it may upload what is sealed first


def trusted_for_peers(ca_file: str | None) -> ssl.SSLContext:
    """The authorities in the file, or the system's. Raises ConfigurationError."""
    try:
        if ca_file is None:
            return _system_authorities()
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"cluster.ca.file {ca_file}: {error.strerror}") from error


@cache
def _system_authorities() -> ssl.SSLContext:
    """Once for all of a broker's connections: they take 40 ms to load."""
    return httpx2.create_ssl_context(trust_env=False)


def check_trusted(url: str, ca_file: str | None) -> None:
    """Raises PeerUnavailable for a url without TLS, if the cluster has authorities."""
    if ca_file is not None and not url.startswith("https://"):
        raise PeerUnavailable(f"{url}: it is not https://, and there is cluster.ca.file")


class HttpPeers:
    """Thread-safe. `token`: of scope `cluster`, or empty if none is needed. `session_timeout_ms`:
    how long a leader may take to answer a replica, beside what it waits.
    """

    def __init__(
        self, *, token: str = "", ca_file: str | None = None, session_timeout_ms: int = 6_000
    ) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        verify, self._ca_file = trusted_for_peers(ca_file), ca_file
        self._http = httpx2.Client(
            headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False
        )
        self._session_timeout_ms = session_timeout_ms
        self._replicas = ReplicaConnections(headers=headers, tls=verify)

    def close(self) -> None:
        self._http.close()
        self._replicas.close()

    def read_leaders(self, url: str) -> LeaderReport:
        """Who takes longer is looked at sooner: its beats may decide within a session time-out."""
        timeout_s = min(TIMEOUT_S, max(1.0, self._session_timeout_ms / 2000))
        return self._read("GET", f"{url}/v1/cluster/leaders", LeaderReport, timeout_s=timeout_s)

    def send_news(
        self,
        url: str,
        *,
        sender: int,
        topics: Sequence[str],
        assigned: Sequence[TopicIdPartition],
        led: Sequence[TopicIdPartition],
    ) -> LeaderReport:
        news = {"sender": sender, "topics": topics, "assigned": assigned, "led": led}
        timeout_s = TIMEOUT_S + ASSIGNED_S * len(assigned)
        return self._read("POST", f"{url}/v1/cluster/news", LeaderReport, news, timeout_s=timeout_s)

    def hand_over(self, url: str, *, topic: str, partition: int, node_id: int) -> None:
        place = f"{url}/v1/topics/{topic}/partitions/{partition}/leader"
        self._call("POST", place, {"node_id": node_id}, timeout_s=MOVE_TIMEOUT_S)

    def reassign(
        self, url: str, *, topic: str, partition: int, replicas: Sequence[int]
    ) -> Reassigned:
        place = f"{url}/v1/topics/{topic}/partitions/{partition}/replicas"
        if not replicas:
            return self._read("DELETE", place, Reassigned)
        return self._read("POST", place, Reassigned, {"replicas": replicas})

    def set_draining(self, url: str, node_id: int, *, draining: bool) -> None:
        place = f"{url}/v1/cluster/brokers/{node_id}/drain"
        if draining:
            self._call("POST", place, {})
        else:
            self._call("DELETE", place)

    def fetch_replicas(
        self, url: str, request: ReplicaFetch, *, asked: Collection[TopicIdPartition]
    ) -> FetchedRows:
        check_trusted(url, self._ca_file)
        timeout_s = (request.wait_ms + self._session_timeout_ms) / 1000
        return self._replicas.fetch_replicas(url, request, asked=asked, timeout_s=timeout_s)

    def take_part(self, url: str, part: TransactionPart) -> str:
        return self._read("POST", f"{url}/v1/cluster/transaction-parts", str, part)

    def write_markers(self, url: str, markers: Sequence[Marker]) -> list[str]:
        place = f"{url}/v1/cluster/transaction-markers"
        return self._read("POST", place, list[str], {"markers": markers})

    def call_group_configs(
        self, url: str, call: GroupConfigCall
    ) -> dict[str, dict[str, ConfigValue]]:
        place = f"{url}/v1/cluster/group-configs"
        return self._read("POST", place, dict[str, dict[str, ConfigValue]], call)

    def ask_share_states(self, url: str, calls: Sequence[StateCall]) -> list[StateAnswer]:
        place = f"{url}/v1/cluster/share-states"
        return self._read("POST", place, list[StateAnswer], {"calls": calls})

    def find_schema(self, url: str, call: SchemaCall) -> list[SourceOfId]:
        return self._read("POST", f"{url}/v1/cluster/schemas", list[SourceOfId], call)

    def _read(
        self,
        method: str,
        url: str,
        kind: type[T],
        document: object = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        body = self._call(method, url, document, timeout_s=timeout_s)
        try:
            return decode_json(body, kind)
        except msgspec.MsgspecError as error:
            raise PeerUnavailable(f"{url}: {error}") from error

    def _call(
        self, method: str, url: str, document: object = None, *, timeout_s: float = TIMEOUT_S
    ) -> bytes:
        check_trusted(url, self._ca_file)
        try:
            answer = self._http.request(
                method,
                url,
                content=None if document is None else msgspec.json.encode(document),
                headers={"content-type": "application/json"} if document is not None else {},
                timeout=timeout_s,
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise PeerUnavailable(f"{url}: {error or type(error).__name__}") from error
        if answer.status_code >= 300:
            raise PeerUnavailable(f"{url}: {answer.status_code}: {answer.text[:500]}")
        return answer.content
