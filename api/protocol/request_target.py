"""Normalizes a request target to origin-form, the only form that the rest of the code reads.

* In absolute-form, as sent to a proxy (RFC 9112, 3.2.2), the URL names the host and `Host` is
  ignored: the URL's host replaces it before anything is checked.
* Another scheme, or userinfo before the host (RFC 9110, 4.2.4), is refused.
"""

from __future__ import annotations

import re
from typing import Final

from record_format.errors import InvalidRequest

_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


def to_origin_form(url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the path and query of a target that does not begin with `/`, and set `Host` in
    `headers` to its host. `*` is returned as it is. Raises InvalidRequest.
    """
    if url == b"*":
        return url
    found = _ABSOLUTE.fullmatch(url)
    if found is None:
        raise InvalidRequest(
            "the request target is neither a path nor an http URL without userinfo"
        )
    authority, target = found.groups()
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]
    if target is None:
        return b"/"
    return bytes(target if target.startswith(b"/") else b"/" + target)
