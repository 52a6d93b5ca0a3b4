"""What a request asks for, brought into the one form that is read further on.

* A target that is a whole URL (what is sent to a proxy; RFC 9112, 3.2.2) names the host itself, and
  `Host` then counts for nothing: the name in the URL takes its place, before anybody checks it.
* Another scheme, and a name or password before the host (RFC 9110, 4.2.4), are no request to us.
"""

from __future__ import annotations

import re
from typing import Final

from record_format.errors import InvalidRequest

_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


def to_origin_form(url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The path and query of a target that does not begin with `/`; mends `Host` in `headers`.

    `*` stays what it is. Raises InvalidRequest.
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
