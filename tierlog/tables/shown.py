"""What the console shows of topics' tables. The catalog is named by the broker's settings; its URL,
which may have a password, is in no error.

A table's name is not its topic's: what is shown is checked to be of the topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tierlog.api.http.settings import FindTable, ShownTable
from tierlog.record_format.errors import RetriableError, TierlogError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog


class CatalogRefused(RetriableError):
    """A catalog does not answer, or is not configured."""


def table_finder(
    catalog: str,
    properties: Mapping[str, str],
    near: Mapping[str, str] = MappingProxyType({}),
) -> FindTable:
    """Imports PyIceberg, which takes seconds, at the first call. `properties`, `near`: as of
    `open_catalog`.
    """

    def find(topic: str, topic_id: str) -> ShownTable | None:
        from tierlog.tables.catalog import open_catalog

        try:
            opened = open_catalog(catalog, properties, near=near)
            return _find_table(opened, catalog, topic=topic, topic_id=topic_id)
        except TierlogError as error:
            raise CatalogRefused(str(error).replace(catalog, "…")) from None

    return find


def _find_table(catalog: Catalog, place: str, *, topic: str, topic_id: str) -> ShownTable | None:
    from tierlog.tables.catalog import UnknownTable, load_table, table_name
    from tierlog.tables.errors_table import latest_refused, load_errors, schema_of_most
    from tierlog.tables.status import status_of

    try:
        table = load_table(catalog, table_name(None, topic))
    except UnknownTable:
        return None
    status = status_of(table, None)
    if status.topic != topic:
        return None
    if status.topic_id != topic_id:
        again = "it is of a topic of this name that was deleted: make another table"
        status = status._replace(problem=again)
    try:
        errors = load_errors(catalog, table) if status.errors else None
        refused = [] if errors is None else latest_refused(errors)
    except TierlogError as error:
        return ShownTable(status, [], None, str(error).replace(place, "…"))
    return ShownTable(status, refused, schema_of_most(refused), "")
