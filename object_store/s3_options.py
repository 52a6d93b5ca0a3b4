"""Connection options for an S3 bucket, in addition to AWS's environment, profiles and files.

* An option that is None is left to AWS's provider chain (environment, profile, instance or web
  identity).
* The repr contains no secrets, so that no log line can.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tierlog.host.loopback import is_loopback


@dataclass(frozen=True, kw_only=True)
class S3Options:
    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    """None: path style with a custom endpoint, AWS's default otherwise."""
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    ca_bundle: str | None = None
    """Path of a PEM file, for an endpoint whose certificate is not from a public authority."""
    storage_class: str | None = None
    """For segment logs only: manifests and indexes are small and read often."""
    server_side_encryption: str | None = None
    """`AES256`, `aws:kms` or `aws:kms:dsse`; None means the bucket's default."""
    sse_kms_key_id: str | None = field(default=None, repr=False)
    max_connections: int = 48
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """The longest a connection may be idle during a request, not the length of a transfer."""
    range_timeout_s: float = 10.0
    """The same for ranged GETs, for which a reader waits and which a retry may serve sooner."""
    deadline_s: float = 60.0
    """For a write including its retries; each part of a large upload has its own."""

    @property
    def is_loopback(self) -> bool:
        """Whether the endpoint is this machine; proxies from the environment are then ignored."""
        return is_loopback(urlsplit(self.endpoint or "").hostname or "")
