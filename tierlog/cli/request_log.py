"""`--verbose`: logs each HTTP request, and each request to the store.

Otherwise no callback is set: logging a line takes longer than a small fetch.
"""

from __future__ import annotations

import structlog

from api.http.exchange import Exchange
from cold_tier.store_ledger import StoreRequest

log = structlog.get_logger(__name__)


def log_request(exchange: Exchange, status: str) -> None:
    """Log a request after its response; without its query, which may contain record keys."""
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


def log_store_request(request: StoreRequest) -> None:
    """Log each attempt; a ranged GET is timed until its response begins."""
    log.debug(
        "store request",
        operation=request.operation,
        key=request.key,
        outcome=request.outcome,
        ms=round(request.took_s * 1000, 1),
        **({"error": request.error} if request.error else {}),
    )
