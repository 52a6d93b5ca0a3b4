"""How long a started request is referenced, and what it keeps open."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierlog.api.http.calls import Call, CallTable
from tierlog.api.http.context import ImmediateHandlers
from tierlog.api.http.dispatch import TierlogApp
from tierlog.api.http.metrics.registry import HttpMetrics
from tierlog.api.http.problems import to_problem
from tierlog.api.http.responses import FileResponse, Response
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.record_format.errors import InvalidRequest


async def receive() -> Any:
    raise NotImplementedError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


def app_of(respond: Any, admit: Any = None) -> TierlogApp:
    async def handler(context: Any, exchange: Any) -> Any:
        return respond()

    nothing = SimpleNamespace(
        is_current=lambda: True,
        authenticate=lambda _: None,
        authorize=lambda *_: None,
        release=lambda _: None,
        admit=admit,
    )
    context: Any = SimpleNamespace(
        access=nothing,
        unsent=nothing,
        metrics=HttpMetrics(),
        gateway=None,
        immediate=ImmediateHandlers(),
        problem=lambda _, error, writing: to_problem(error, request_id="", writing=writing),
    )
    call = Call(method="GET", path="/now", handler=handler, immediate=True, tag="", summary="")
    return TierlogApp(context, CallTable([call]))


def scope() -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": "/now", "raw_path": b"/now", "headers": []}


def holders_of(path: Path) -> int:
    links = Path("/proc/self/fd")
    return sum(os.path.realpath(link) == str(path) for link in links.iterdir())


def test_files_of_an_immediate_response_are_released_while_the_connection_stays_open(path):
    app = app_of(lambda: FileResponse(200, [], (FileSlice(OpenFile(path), 0, 10),)))
    kept = scope()  # by the protocol, until another request comes
    response = app.try_respond(kept)
    assert response is not None
    app.response_sent(kept, unsent=())
    assert holders_of(path) == 0


def test_an_error_response_keeps_no_file_open(path):
    def respond() -> None:
        with closing(OpenFile(path)) as opened:
            raise InvalidRequest(f"{opened.name} is not for you")

    app, kept = app_of(respond), scope()
    response = app.try_respond(kept)
    assert response is not None
    assert response.status == 400
    assert holders_of(path) == 0


def test_a_response_too_large_to_be_immediate_is_counted_as_unsent():
    counted: list[int] = []
    sent: list[Any] = []

    async def admit(_: Any, response: Response) -> Response:
        counted.append(response.size_bytes)
        return response

    async def send(message: Any) -> None:
        sent.append(message)

    app, kept = app_of(lambda: Response(200, [], bytes(300_000)), admit), scope()
    assert app.try_respond(kept) is None
    asyncio.run(app(kept, receive, send))
    assert counted == [300_000]
    assert sum(len(message.get("body", b"")) for message in sent) == 300_000


def test_an_empty_file_response_is_sent_without_its_file(path):
    app = app_of(lambda: FileResponse(200, [], ()))
    response = app.try_respond(scope())
    assert response is not None
    assert not response.slices
    assert (b"content-length", b"0") in response.headers


def test_a_304_has_no_content_length():
    response = app_of(lambda: Response(304, [])).try_respond(scope())
    assert response is not None
    assert b"content-length" not in dict(response.headers)


def test_a_handler_that_has_to_wait_goes_on_in_the_task_of_its_request():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def admit(_: Any, response: Response) -> Response:
        return response

    async def run() -> None:
        app = app_of(lambda: None, admit)
        context: Any = app.context
        begun: list[asyncio.Task[Any] | None] = []

        async def handler(*_: Any) -> Response:
            begun.append(running_task())
            await context.immediate.until_task()
            begun.append(running_task())
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(fail(), 5)
            return Response(200, [], b"late")

        async def fail() -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError

        call = Call(method="GET", path="/now", handler=handler, immediate=True, tag="", summary="")
        app.table = CallTable([call])
        kept = scope()
        answered: list[object] = []
        asyncio.get_running_loop().call_soon(lambda: answered.append(app.try_respond(kept)))
        await asyncio.sleep(0)
        assert answered == [None]
        task = asyncio.create_task(app(kept, receive, send))
        await task
        assert begun == [None, task]

    asyncio.run(run())
    assert sent[1]["body"] == b"late"


def running_task() -> asyncio.Task[Any] | None:
    return asyncio.current_task()
