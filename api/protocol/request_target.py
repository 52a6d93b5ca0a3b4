"""A request's target, brought into the one form that the rest of the code reads.

* A target that is a whole URL (as sent to a proxy; RFC 9112, 3.2.2) names the host itself, and
  `Host` is ignored: the name in the URL replaces it before anything is checked.
* Another scheme, or a user name or password before the host (RFC 9110, 4.2.4), is refused.
"""

from __future__ import annotations

import re
from typing import Final

from record_format.errors import InvalidRequest

_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


def to_origin_form(url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The path and query of a target that does not begin with `/`; corrects `Host` in `headers`.

    `*` stays as it is. Raises InvalidRequest.
    """
    if url == b"*":
        return url
    found = _ABSOLUTE.fullmatch(url)
    if found is None:
        raise InvalidRequest("its target is neither a path nor an http URL with only a host")
    authority, target = found.groups()
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]
    if target is None:
        return b"/"
    return bytes(target if target.startswith(b"/") else b"/" + target)
