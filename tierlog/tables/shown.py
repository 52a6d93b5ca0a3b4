"""What the console shows of topics' tables. The catalog is named by the broker's settings; its URL,
which may have a password, is in no error.

A table's name is not its topic's: what is shown is checked to be of the topic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierlog.api.http.settings import ShownTable
from tierlog.record_format.errors import RetriableError, TierlogError

REFUSED_SHOWN: Final = 20


class CatalogRefused(RetriableError):
    """A catalog does not answer, or is not configured."""


def table_finder(catalog: str, warehouse: str | None) -> Callable[[str, str], ShownTable | None]:
    """Imports PyIceberg, which takes seconds, at the first call."""

    def find(topic: str, topic_id: str) -> ShownTable | None:
        try:
            return _find_table(catalog, warehouse, topic=topic, topic_id=topic_id)
        except TierlogError as error:
            raise CatalogRefused(str(error).replace(catalog, "…")) from None

    return find


def _find_table(
    place: str, warehouse: str | None, *, topic: str, topic_id: str
) -> ShownTable | None:
    from tierlog.tables.catalog import UnknownTable, load_table, open_catalog, table_name
    from tierlog.tables.errors_table import latest_refused, load_errors
    from tierlog.tables.status import status_of

    catalog = open_catalog(place, {"warehouse": warehouse} if warehouse else {})
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
        refused = [] if errors is None else latest_refused(errors, limit=REFUSED_SHOWN)
    except TierlogError as error:
        return ShownTable(status, [], str(error).replace(place, "…"))
    return ShownTable(status, refused, "")
