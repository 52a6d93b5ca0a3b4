"""Compatibility levels and modes: a subject's own, or without one those of all that have none."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import msgspec
from fastapi import Depends, Response

from tierlog.api.http.calls import Endpoint
from tierlog.api.http.control_routes import TheExchange, body_as, query_as
from tierlog.api.http.registry.documents import (
    Defaulting,
    Forcing,
    GivenLevel,
    KeptLevel,
    Mode,
    Nothing,
)
from tierlog.api.http.registry.handlers import ACCEPTED, TheAsked
from tierlog.broker.schema_registry.registry import check_subject, not_set
from tierlog.record_format.schema_records import LEVEL, MODE, Setting


class SettingShape(NamedTuple):
    """`given`: the body of a PUT and of its answer; `kept`: that of other answers. Both have one
    member. `setting_query`: a PUT's.
    """

    setting: Setting
    given: type[Any]
    kept: type[Any]
    setting_query: type[Any]


LEVELS: Final = SettingShape(LEVEL, GivenLevel, KeptLevel, Nothing)
MODES: Final = SettingShape(MODE, Mode, Mode, Forcing)


class SettingEndpoints(NamedTuple):
    show: Endpoint
    set: Endpoint
    reset: Endpoint


async def _subject_of(exchange: TheExchange) -> str | None:
    """Raises InvalidSchema."""
    subject = exchange.params.get("subject")
    check_subject(subject)
    return subject


TheSubject = Annotated[str | None, Depends(_subject_of)]


def setting_endpoints(shape: SettingShape, name: str) -> SettingEndpoints:
    """`name`: of what they set, in the names of the calls."""
    setting, given, kept, setting_query = shape
    the_query, the_body = query_as(setting_query), body_as(given, accepted=ACCEPTED)

    async def show(
        asked: TheAsked,
        subject: TheSubject,
        query: Annotated[Defaulting, query_as(Defaulting)],
    ) -> Response:
        is_default = subject is None or query.default_to_global
        found = await asked.context.read(
            asked.registry.read, lambda state: state.setting(setting, subject, default=is_default)
        )
        if found is None:
            raise not_set(setting, subject)
        return asked.answer(kept(found))

    async def set_(
        asked: TheAsked,
        subject: TheSubject,
        query: Any = the_query,
        body: Any = the_body,
    ) -> Response:
        (value,) = msgspec.structs.astuple(body)
        options = msgspec.structs.asdict(query)
        put = asked.registry.put_setting
        kept_as: str = await asked.context.write(put, setting, subject, value, **options)
        return asked.answer(given(kept_as))

    async def reset(asked: TheAsked, subject: TheSubject) -> Response:
        was: str = await asked.context.write(asked.registry.reset_setting, setting, subject)
        return asked.answer(kept(was))

    show.__name__, set_.__name__, reset.__name__ = f"get_{name}", f"set_{name}", f"reset_{name}"
    return SettingEndpoints(show, set_, reset)
