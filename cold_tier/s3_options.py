"""How to reach an S3 bucket: what AWS's own environment, profiles and files do not say.

* Whatever is None is left to AWS's chain (environment, profile, instance or web identity).
* Secrets are not in its repr, so that no log line can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from record_format.loopback import is_loopback


@dataclass(frozen=True, kw_only=True)
class S3Options:
    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    """None: path style where there is an endpoint of one's own, AWS's own style otherwise."""
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    ca_bundle: str | None = None
    """Path of a PEM file, for an endpoint whose certificate no public authority signed."""
    storage_class: str | None = None
    """Of segment logs alone: manifests and indexes are small and read often."""
    server_side_encryption: str | None = None
    """`AES256`, `aws:kms` or `aws:kms:dsse`; None leaves it to the bucket's default."""
    sse_kms_key_id: str | None = field(default=None, repr=False)
    max_connections: int = 48
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """Longest silence on a connection, not the length of a transfer."""
    range_timeout_s: float = 10.0
    """The same of a ranged GET: somebody waits for it, and another attempt may be luckier."""
    deadline_s: float = 60.0
    """Within it a write with all its repeats ends; parts of a large upload have one each."""

    @property
    def is_on_this_machine(self) -> bool:
        """Then a proxy of the environment is not asked: it is for the world outside."""
        return is_loopback(urlsplit(self.endpoint or "").hostname or "")
