"""The pages about the schema registry: all subjects, one with its versions, and a topic's two.

* In a cluster they are made where `_schemas` is led: a request elsewhere is passed on to there.
* A subject's name is any text, so it is not in a path; for a token it counts as a topic's.
* Versions that are deleted softly are shown as such: records may have their ids.
* What is shown and compared is bounded. JSON is indented; what differs is found line by line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierlog.api.console.record_browser import pretty_json, visible
from tierlog.api.console.rendering import fragment
from tierlog.api.console.topic_pages import page_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.responses import Response
from tierlog.api.serving.grants import Grant
from tierlog.broker.schema_registry.registry import SUBJECT_MAX, SchemaRegistry
from tierlog.record_format.schema_records import LEVEL, MODE, Schema, SubjectVersion
from tierlog.record_format.schema_state import INT_MAX, RegistryState, place_of

SUBJECTS_A_PAGE: Final = 100
TEXT_MAX: Final = 256 << 10  # characters of a schema
COMPARED_MAX: Final = 3000  # lines of each of two versions
_CONTEXT_LINES: Final = 3
_MARKS: Final[dict[str, Mark]] = {"+": "added", "-": "removed", "@": "place", " ": "same"}

Mark = Literal["added", "removed", "same", "place"]
Name = Annotated[str, Meta(max_length=SUBJECT_MAX)]
Number = Annotated[int, Meta(ge=1, le=INT_MAX)]


class SubjectsQuery(msgspec.Struct, forbid_unknown_fields=True):
    filter: Name = ""
    page: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class SubjectQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`version`: the latest if there is none. `against`: what it is compared with."""

    subject: Name
    version: Number | UnsetType = UNSET
    against: Number | UnsetType = UNSET


class SubjectLine(NamedTuple):
    """`level`: its own, or the default's. `versions`: those that are not deleted."""

    name: str
    latest: SubjectVersion
    versions: int
    level: str
    has_own_level: bool


class SubjectList(NamedTuple):
    """`level`: of those that have none of their own."""

    level: str
    lines: list[SubjectLine]
    found: int
    page: int
    pages: int


class DiffLine(NamedTuple):
    mark: Mark
    text: str


class Comparison(NamedTuple):
    """`lines`: None if one is too large to be compared."""

    against: SubjectVersion
    lines: list[DiffLine] | None

    def count(self, mark: Mark) -> int:
        return sum(one.mark == mark for one in self.lines or ())


class SubjectPage(NamedTuple):
    """`versions`: the newest first. `referrers`: what refers to the one that is shown."""

    versions: list[SubjectVersion]
    shown: SubjectVersion
    text: str
    is_cut: bool
    referrers: list[SubjectVersion]
    level: str
    has_own_level: bool
    mode: str
    comparison: Comparison | None


async def subjects(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(SubjectsQuery)
    registry, grant = context.broker.schema_registry, exchange.grant
    found = await context.read(registry.read, lambda state: _subject_list(state, grant, query))
    return fragment("subjects.html", subjects=found, filter=query.filter)


def _subject_list(state: RegistryState, grant: Grant, query: SubjectsQuery) -> SubjectList:
    wanted = query.filter.strip().casefold()
    seen = [one for one in state.subjects() if grant.sees_topic(one) and wanted in one.casefold()]
    names, page, pages = page_of(seen, query.page, size=SUBJECTS_A_PAGE)
    lines = [line for name in names if (line := _line(state, name))]
    return SubjectList(state.setting(LEVEL, None) or "", lines, len(seen), page, pages)


def _line(state: RegistryState, name: str) -> SubjectLine | None:
    versions = state.versions(name)
    if not versions:
        return None
    own = state.setting(LEVEL, name, default=False)
    return SubjectLine(
        name, versions[-1], len(versions), own or state.setting(LEVEL, name) or "", own is not None
    )


async def topic_schemas(context: Context, exchange: Exchange) -> Response:
    topic = context.broker.topic(exchange.topic)
    names = [f"{topic.record.name}-{part}" for part in ("value", "key")]
    found = await context.read(
        context.broker.schema_registry.read,
        lambda state: [(name, _line(state, name)) for name in names],
    )
    return fragment(
        "topic_schemas.html",
        name=topic.record.name,
        subjects=found,
        validation=topic.effective_config()["schema.validation"],
    )


async def subject(context: Context, exchange: Exchange) -> Response:
    """Raises UnknownSchema, Forbidden."""
    query = exchange.query(SubjectQuery)
    exchange.grant.check_topic(query.subject)
    sees = exchange.grant.sees_topic
    found = await context.read(_subject_page, context.broker.schema_registry, query, sees)
    return fragment("subject.html", name=query.subject, found=found)


def _subject_page(
    registry: SchemaRegistry, query: SubjectQuery, sees: Callable[[str], bool]
) -> SubjectPage:
    def look(state: RegistryState) -> SubjectPage:
        name = query.subject
        versions = state.known_versions(name, deleted=True)
        shown = versions[-1] if not (live := state.versions(name)) else live[-1]
        if query.version is not UNSET:
            shown = state.version(name, query.version, deleted=True)
        own = state.setting(LEVEL, name, default=False)
        return SubjectPage(
            versions=versions[::-1],
            shown=shown,
            text="",
            is_cut=False,
            referrers=[one for one in state.referrers(place_of(shown)) if sees(one.subject)],
            level=own or state.setting(LEVEL, name) or "",
            has_own_level=own is not None,
            mode=state.setting(MODE, name) or "",
            comparison=None
            if query.against is UNSET
            else Comparison(state.version(name, query.against, deleted=True), None),
        )

    page = registry.read(look)
    text = _text_of(page.shown.schema)
    comparison = page.comparison
    if comparison is not None:
        before = _with_references(comparison.against.schema)
        lines = differences(before, _with_references(page.shown.schema))
        comparison = comparison._replace(lines=lines)
    return page._replace(
        text=visible(text[:TEXT_MAX]), is_cut=len(text) > TEXT_MAX, comparison=comparison
    )


def _text_of(schema: Schema) -> str:
    if schema.kind == "PROTOBUF":
        return schema.text
    return pretty_json(schema.text.encode(), max_bytes=TEXT_MAX) or schema.text


def _with_references(schema: Schema) -> str:
    """Versions may differ in nothing else."""
    named = [f"{one.name}: {one.subject}, version {one.version}" for one in schema.references]
    return "\n".join([_text_of(schema), *named])


def differences(before: str, after: str) -> list[DiffLine] | None:
    """Unified, without the names of what is compared; empty if they are the same, None if one has
    more than COMPARED_MAX lines or TEXT_MAX characters.
    """
    old, new = visible(before).splitlines(), visible(after).splitlines()
    if max(len(old), len(new)) > COMPARED_MAX or max(len(before), len(after)) > TEXT_MAX:
        return None
    found = list(difflib.unified_diff(old, new, lineterm="", n=_CONTEXT_LINES))[2:]
    return [DiffLine(_MARKS[line[0]], line[1:]) for line in found]
