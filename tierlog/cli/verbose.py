"""What `--verbose` adds to the log: a line for each request, and one for each to the store.

Without it nobody is given where to tell them: a small fetch takes less than a line.
"""

from __future__ import annotations

import structlog

from api.http.exchange import Exchange
from cold_tier.store_ledger import StoreRequest

log = structlog.get_logger(__name__)


def tell_request(exchange: Exchange, status: str) -> None:
    """Once it is answered. Without its query, which may hold keys of records."""
    scope = exchange.scope
    client = scope.get("client")
    log.debug(
        "request",
        method=exchange.method,
        path=(scope.get("raw_path") or b"").decode("ascii", "backslashreplace"),
        status=status,
        ms=round(exchange.timings.elapsed_s * 1000, 1),
        request_id=exchange.request_id,
        client=client[0] if client else None,
    )


def tell_store_request(request: StoreRequest) -> None:
    """Each attempt; of a ranged GET, until its answer begins."""
    log.debug(
        "store request",
        operation=request.operation,
        key=request.key,
        outcome=request.outcome,
        ms=round(request.took_s * 1000, 1),
        **({"error": request.error} if request.error else {}),
    )
