"""Which scopes each call needs, in one table: any one of those listed is enough.

* A call that is not in the table needs `admin`: a forgotten row denies access, never grants it.
* `whole`: the call is about all topics at once, so a token with a topic prefix may not make it.
  Other calls are checked by the topic, or the subject, in their path, or topic by topic in their
  handlers.
* HEAD is treated as GET.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierlog.api.serving.grants import Scope

READ, PRODUCE, ADMIN, CLUSTER = Scope.READ, Scope.PRODUCE, Scope.ADMIN, Scope.CLUSTER


class Need:
    """`whole` as above."""

    __slots__ = ("scopes", "whole")

    def __init__(self, *scopes: Scope, whole: bool = False) -> None:
        self.scopes, self.whole = scopes, whole


SCRIPT: Final = b"text/javascript; charset=utf-8"
STYLE: Final = b"text/css; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"
# The static files by name, with their media types.
CONSOLE_NAMES: Final[Mapping[str, bytes]] = {
    "actions.js": SCRIPT,
    "charts.js": SCRIPT,
    "choices.js": SCRIPT,
    "console.css": STYLE,
    "console.js": SCRIPT,
    "download.js": SCRIPT,
    "format.js": SCRIPT,
    "htmx.LICENSE.txt": TEXT,
    "htmx.min.js": SCRIPT,
    "icon.svg": b"image/svg+xml",
    "search.js": SCRIPT,
    "tail.js": SCRIPT,
    "travel.js": SCRIPT,
    "uplot.LICENSE.txt": TEXT,
    "uplot.min.css": STYLE,
    "uplot.min.js": SCRIPT,
    "viewer.js": SCRIPT,
}
DOCS_NAMES: Final[Mapping[str, bytes]] = {
    "docs.js": SCRIPT,
    "docs.css": STYLE,
}
# The pages of the console and of the documentation, and their scripts, contain no data, and have to
# be served without a token so that they can ask for one.
_CONSOLE_PAGE: Final = ("/", *(f"/console/static/{name}" for name in CONSOLE_NAMES))
_DOCS_PAGE: Final = ("/docs", *(f"/docs/{name}" for name in DOCS_NAMES))
OPEN_PATHS: Final = frozenset(("/healthz", "/readyz", *_CONSOLE_PAGE, *_DOCS_PAGE))
UNLISTED: Final = Need(ADMIN, whole=True)
_TOPIC: Final = "/v1/topics/{topic}"
_PARTITION: Final = _TOPIC + "/partitions/{partition}"
_TRANSACTION: Final = "/v1/transactions/{transactional_id}"
_BROKER: Final = "/v1/cluster/brokers/{node}"
_SUBJECT: Final = "/subjects/{subject}"
_VERSION: Final = _SUBJECT + "/versions/{version}"
_SCHEMA_ID: Final = "/schemas/ids/{schema_id}"
_SHOWN_TOPIC: Final = "/console/topics/{topic}"
_SHOWN_PARTITION: Final = _SHOWN_TOPIC + "/partitions/{partition}"
NEEDS: Final[Mapping[tuple[str, str], Need]] = {
    ("POST", "/v1/topics"): Need(ADMIN),
    ("GET", "/v1/topics"): Need(READ),
    ("GET", _TOPIC): Need(READ, PRODUCE),
    ("PATCH", _TOPIC): Need(ADMIN),
    ("DELETE", _TOPIC): Need(ADMIN),
    ("POST", _TOPIC + "/records"): Need(PRODUCE),
    ("POST", _PARTITION + "/records"): Need(PRODUCE),
    ("POST", "/v1/producers"): Need(PRODUCE),
    ("GET", _PARTITION + "/records"): Need(READ),
    ("GET", _PARTITION + "/tail"): Need(READ),
    ("GET", _TOPIC + "/tail"): Need(READ),
    ("POST", "/v1/fetch"): Need(READ),
    ("GET", _PARTITION + "/offsets"): Need(READ),
    ("GET", _PARTITION + "/segments"): Need(READ),
    ("GET", _PARTITION + "/segments/{base_offset}"): Need(READ),
    ("GET", _PARTITION + "/manifest"): Need(READ),
    ("POST", _PARTITION + "/trim"): Need(ADMIN),
    ("GET", _PARTITION + "/merge"): Need(ADMIN),
    ("POST", _PARTITION + "/merge"): Need(ADMIN),
    ("POST", _TOPIC + "/offload"): Need(ADMIN),
    ("POST", _TOPIC + "/merge"): Need(ADMIN),
    ("POST", _TOPIC + "/verify"): Need(ADMIN),
    ("POST", _TOPIC + "/repair"): Need(ADMIN),
    ("GET", _TOPIC + "/pins"): Need(READ),
    ("POST", _TOPIC + "/pins"): Need(ADMIN),
    ("DELETE", _TOPIC + "/pins/{pin}"): Need(ADMIN),
    ("PUT", "/v1/groups/{group}/offsets"): Need(READ),
    ("GET", "/v1/groups/{group}"): Need(READ),
    ("GET", "/v1/groups"): Need(READ),
    ("DELETE", "/v1/groups/{group}"): Need(ADMIN),
    ("POST", "/v1/groups/{group}/members"): Need(READ),
    ("POST", "/v1/groups/{group}/members/{member}/heartbeat"): Need(READ),
    ("DELETE", "/v1/groups/{group}/members/{member}"): Need(READ),
    ("GET", "/v1/cluster"): Need(READ),
    ("GET", "/v1/cluster/leaders"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/news"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/transaction-parts"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/transaction-markers"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/group-configs"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/share-states"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/schemas"): Need(CLUSTER, whole=True),
    ("POST", "/v1/replica/fetch"): Need(CLUSTER, whole=True),
    ("POST", "/v1/cluster/rebalance"): Need(ADMIN, whole=True),
    ("POST", _BROKER + "/drain"): Need(CLUSTER, whole=True),
    ("DELETE", _BROKER + "/drain"): Need(CLUSTER, whole=True),
    ("DELETE", _BROKER): Need(ADMIN, whole=True),
    ("POST", _PARTITION + "/leader"): Need(CLUSTER),
    ("POST", _PARTITION + "/replicas"): Need(CLUSTER),
    ("DELETE", _PARTITION + "/replicas"): Need(CLUSTER),
    ("GET", "/v1/cluster/reassignments"): Need(READ, whole=True),
    ("POST", "/v1/transactions"): Need(PRODUCE),
    ("GET", "/v1/transactions"): Need(PRODUCE),
    ("GET", _TRANSACTION): Need(PRODUCE),
    ("POST", _TRANSACTION + "/offsets"): Need(PRODUCE),
    ("POST", _TRANSACTION + "/commit"): Need(PRODUCE),
    ("POST", _TRANSACTION + "/abort"): Need(PRODUCE),
    ("GET", "/schemas"): Need(READ, PRODUCE),
    ("GET", "/schemas/types"): Need(READ, PRODUCE),
    ("GET", _SCHEMA_ID): Need(READ, PRODUCE),
    ("GET", _SCHEMA_ID + "/schema"): Need(READ, PRODUCE),
    ("GET", _SCHEMA_ID + "/subjects"): Need(READ, PRODUCE),
    ("GET", _SCHEMA_ID + "/versions"): Need(READ, PRODUCE),
    ("GET", "/schemas/guids/{guid}"): Need(READ, PRODUCE),
    ("GET", _SUBJECT + "/metadata"): Need(READ, PRODUCE),
    ("GET", "/contexts"): Need(READ, PRODUCE),
    ("GET", "/subjects"): Need(READ, PRODUCE),
    ("POST", _SUBJECT): Need(READ, PRODUCE),
    ("DELETE", _SUBJECT): Need(ADMIN),
    ("GET", _SUBJECT + "/versions"): Need(READ, PRODUCE),
    ("POST", _SUBJECT + "/versions"): Need(PRODUCE),
    ("GET", _VERSION): Need(READ, PRODUCE),
    ("GET", _VERSION + "/schema"): Need(READ, PRODUCE),
    ("GET", _VERSION + "/referencedby"): Need(READ, PRODUCE),
    ("DELETE", _VERSION): Need(ADMIN),
    ("POST", "/compatibility" + _VERSION): Need(READ, PRODUCE),
    ("POST", "/compatibility" + _SUBJECT + "/versions"): Need(READ, PRODUCE),
    ("GET", "/config"): Need(READ, PRODUCE),
    ("PUT", "/config"): Need(ADMIN, whole=True),
    ("DELETE", "/config"): Need(ADMIN, whole=True),
    ("GET", "/config/{subject}"): Need(READ, PRODUCE),
    ("PUT", "/config/{subject}"): Need(ADMIN),
    ("DELETE", "/config/{subject}"): Need(ADMIN),
    ("GET", "/mode"): Need(READ, PRODUCE),
    ("PUT", "/mode"): Need(ADMIN, whole=True),
    ("DELETE", "/mode"): Need(ADMIN, whole=True),
    ("GET", "/mode/{subject}"): Need(READ, PRODUCE),
    ("PUT", "/mode/{subject}"): Need(ADMIN),
    ("DELETE", "/mode/{subject}"): Need(ADMIN),
    ("GET", "/healthz"): Need(READ),
    ("GET", "/readyz"): Need(READ),
    ("GET", "/metrics"): Need(READ, whole=True),
    ("GET", "/v1/storage"): Need(READ, whole=True),
    ("GET", "/openapi.json"): Need(READ),
    ("GET", "/docs"): Need(READ),
    ("GET", "/docs/{file}"): Need(READ),
    ("GET", "/"): Need(READ),
    ("GET", "/console/static/{file}"): Need(READ),
    ("GET", "/console/overview"): Need(READ),
    ("GET", "/console/summary"): Need(READ, whole=True),
    ("GET", "/console/samples"): Need(READ, whole=True),
    ("GET", "/console/topics"): Need(READ),
    ("GET", "/console/create"): Need(READ),
    ("GET", "/console/numbers"): Need(READ),
    ("GET", "/console/group"): Need(READ),
    ("GET", "/console/groups"): Need(READ),
    ("GET", "/console/offsets"): Need(READ),
    ("GET", "/console/transactions"): Need(READ),
    ("GET", "/console/subjects"): Need(READ),
    ("GET", "/console/subject"): Need(READ),
    ("GET", "/console/store"): Need(READ, whole=True),
    ("GET", "/console/brokers"): Need(READ, whole=True),
    ("GET", "/console/balance"): Need(READ, whole=True),
    ("GET", "/console/drain"): Need(READ, whole=True),
    ("GET", _SHOWN_TOPIC): Need(READ),
    ("GET", _SHOWN_TOPIC + "/samples"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/search"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/found"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/download"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/tail"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/schemas"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/table"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/produce"): Need(READ, PRODUCE),
    ("GET", _SHOWN_TOPIC + "/settings"): Need(READ),
    ("GET", _SHOWN_TOPIC + "/storage"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/records"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/records/{offset}"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/segments"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/leader"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/manifest"): Need(READ),
    ("GET", _SHOWN_PARTITION + "/tail"): Need(READ),
}
