"""Assembles the application: FastAPI with the API's calls, its documentation and the console."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI

from tierlog.api.console.pages import Console
from tierlog.api.http.calls import CallTable
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import ControlRoute
from tierlog.api.http.dispatch import TierlogApp
from tierlog.api.http.docs import openapi
from tierlog.api.http.routes import CALLS
from tierlog.api.http.server import Beside
from tierlog.api.http.settings import HttpSettings
from tierlog.api.http.static_pages import DOCS_CALLS, document_call
from tierlog.api.kafka.settings import BrokerConfig, KafkaSettings
from tierlog.broker.broker import Broker

DESCRIPTION = (
    "One log over two tiers: the tail on local disk, sealed segments in a bucket. "
    "Every GET also answers HEAD, with the same headers and without a body. Refusals are problem "
    "documents (RFC 9457)."
)

ROUTES: Final = tuple(
    ControlRoute(call, call.endpoint, shown=True) for call in CALLS if call.endpoint is not None
)
"""Of each application: FastAPI takes 60 ms to look at what their handlers take."""


def create_app(broker: Broker, settings: HttpSettings) -> TierlogApp:
    """Create the application of an open broker. The caller closes the broker after its shutdown."""
    context = Context(broker, settings)
    if broker.cluster is not None:
        # Imported here: a broker alone pays neither time nor memory for it.
        from tierlog.api.http.cluster.gateway import Gateway
        from tierlog.api.http.metrics.cluster_metrics import ClusterMetrics

        context.gateway = Gateway(context, broker.cluster)
        passed_on = context.gateway.passed_on
        context.metrics.register(ClusterMetrics(broker, broker.cluster, passed_on))
    console = Console(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await context.access.refresh()
        console.start()
        with broker.gathering_appends(asyncio.get_running_loop().call_soon):
            yield
        await console.stop()
        if context.gateway is not None:
            await context.gateway.close()
        context.close()

    openapi_call = document_call(lambda: app.openapi())  # noqa: PLW0108  `app` does not exist yet
    not_in_it = (*DOCS_CALLS, openapi_call, *console.calls())
    app = TierlogApp(
        context,
        CallTable((*CALLS, *not_in_it)),
        title="tierlog",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # served with an ETag, and to whoever may read
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.routes += ROUTES
    for call in not_in_it:
        if call.endpoint is not None:
            app.router.routes.append(ControlRoute(call, call.endpoint, shown=False))
    app.openapi_version = "3.2.0"  # the first that describes the events of a stream
    generate = app.openapi
    app.openapi = lambda: openapi.complete(generate(), CALLS)  # type: ignore[method-assign]
    return app


def kafka_listener(
    app: TierlogApp,
    settings: KafkaSettings,
    sock: socket.socket,
    *,
    configs: Sequence[BrokerConfig],
) -> Beside:
    """The listener for Kafka clients, on a bound socket, to be served beside the application.
    `configs`: the broker's settings, to be shown.
    """
    # Imported here: a broker without Kafka clients pays neither time nor memory for them.
    from tierlog.api.kafka.context import KafkaContext
    from tierlog.api.kafka.handlers import all_calls
    from tierlog.api.kafka.listener import KafkaListener

    http = app.context
    context = KafkaContext(
        http.broker,
        settings,
        waiting=http.waiting,
        workers=http.workers,
        tokens=http.access.tokens,
        rates=http.access.rates,
        counts=http.kafka_counts,
        broker_configs=configs,
    )
    return KafkaListener(context, all_calls(), sock)
