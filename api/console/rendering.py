"""Renders HTML templates, with the headers of every response of the console.

* Templates escape all values; neither they nor this module mark text as safe.
* The Content-Security-Policy allows scripts, styles and requests only from and to this server, and
  nothing inline: markup that escaped escaping would not run. Fragments have a header of their own,
  without which the page does not swap them in: an API response, whose bytes clients choose, is
  never taken for a fragment.
"""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from tierlog.api.console.record_browser import MAX_DATE_MS, visible
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.responses import NO_STORE, Response
from tierlog.hot_tier.config_words import in_words
from tierlog.hot_tier.log_config import ConfigKey
from tierlog.record_format.units import dollars, rough_duration

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final[HeaderList] = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_HTML: Final = (b"content-type", b"text/html; charset=utf-8")
_FRAGMENT: Final = (b"tierlog-console", b"fragment")
_DEFAULT_HOSTS: Final = ("127.0.0.1:8640", "localhost:8640")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

NOTHING_NEW: Final = Response(204, [NO_STORE, *HEADERS])


@cache
def environment() -> Environment:
    """Created at the first request to the console: most brokers never need it."""
    made = Environment(
        loader=PackageLoader("tierlog.api.console", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        bytes=byte_size,
        count=grouped,
        moment=moment,
        object_moment=object_moment,
        duration=rough_duration,
        dollars=dollars,
        visible=visible,
    )
    made.globals.update(in_words=in_words, choices_of=choices_of)
    made.globals["has_parquet"] = has_parquet()
    return made


def has_parquet() -> bool:
    """Whether pyarrow is installed, which is not part of the base install."""
    return find_spec("pyarrow") is not None


def page(template: str, **values: Any) -> Response:
    return _response(template, values, [_HTML, NO_STORE, *HEADERS])


def fragment(template: str, **values: Any) -> Response:
    return _response(template, values, [_HTML, _FRAGMENT, NO_STORE, *HEADERS])


def _response(template: str, values: dict[str, Any], headers: HeaderList) -> Response:
    return Response(200, headers, environment().get_template(template).render(values).encode())


def server_flag(exchange: Exchange) -> str:
    """The CLI's `--server` flag for the examples on an empty page, by the browser's address."""
    host = exchange.header(b"host") or _DEFAULT_HOSTS[0]
    scheme = exchange.scope.get("scheme", "http")
    if host in _DEFAULT_HOSTS and scheme != "https":
        return ""
    return " --server " + shlex.quote(f"{scheme}://{host}")


def byte_size(size: float) -> str:
    """Three significant digits: 999 B, 1.00 KiB, 12.3 MiB."""
    number = float(size)
    for unit in _UNITS[:-1]:
        if number < 999.5:
            return _three_digits(number, unit)
        number /= 1024
    return _three_digits(number, _UNITS[-1])


def _three_digits(number: float, unit: str) -> str:
    if unit == "B" or number >= 99.95:
        return f"{number:.0f} {unit}"
    return f"{number:.1f} {unit}" if number >= 9.995 else f"{number:.2f} {unit}"


def grouped(number: int) -> str:
    """Thousands separated by a narrow space. Not for offsets, which users paste into commands, nor
    for numbers next to them.
    """
    return f"{number:,}".replace(",", "\u202f")


def moment(timestamp: int | None) -> str:
    """UTC to the millisecond; a dash for None and for -1, Kafka's "no timestamp"."""
    if timestamp is None or timestamp < 0:
        return "–"
    if timestamp > MAX_DATE_MS:
        return f"{timestamp} ms"
    seconds, ms = divmod(timestamp, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{ms:03}Z"


def object_moment(modified_ms: int) -> str:
    """When an object was written, without milliseconds if the store reports none, as S3."""
    return moment(modified_ms).replace(".000Z", "Z")


def choices_of(key: ConfigKey) -> tuple[str, ...]:
    """The values to choose from; empty if a value is typed."""
    if key.kind == "boolean":
        return "true", "false"
    both = (",".join(sorted(key.choices)),) if key.kind == "list" and len(key.choices) > 1 else ()
    return (*key.choices, *both)
