"""Opens a store by its URL: the one place that knows all kinds of stores.

s3://bucket/prefix      S3 or a compatible service; needs an endpoint unless it is AWS
file:///folder          a local folder
memory://name           memory of this process
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from tierlog.host.retry import RetryPolicy
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.memory import named_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import InvalidKey, ObjectStore, check_key
from tierlog.record_format.errors import SettingsError

_EXPECTED = "s3://bucket/prefix, file:///folder or memory://name"


def open_store(
    url: str,
    options: S3Options | None = None,
    *,
    must_exist: bool = False,
    policy: RetryPolicy | None = None,
) -> ObjectStore:
    """Open a store. No request is sent yet. `options` are for `s3://`.

    `must_exist` keeps a folder from being created, for callers that only read. `policy` replaces
    the retry policy of an S3 store, which by default is a broker's and gives up soon. Raises
    SettingsError for a URL of another kind.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # not shown: it may quote secrets
        raise SettingsError(f"the store's URL is invalid; expected {_EXPECTED}") from error
    if parts.query or parts.fragment or parts.username or parts.password:
        raise SettingsError(
            f"store {_redacted(url)}: the URL may have a bucket and a prefix, and nothing else"
        )
    if parts.scheme == "s3":
        if not parts.netloc:
            raise SettingsError(f"store {url}: the URL has no bucket; write s3://bucket/prefix")
        return _open_s3(parts.netloc, parts.path.strip("/"), options or S3Options(), policy)
    if parts.scheme == "file":
        return _open_folder(parts, url=url, must_exist=must_exist)
    if parts.scheme == "memory":
        return named_store(parts.netloc + parts.path.rstrip("/"))
    hint = f"; write this folder as {Path(url).absolute().as_uri()}" if _is_path(url) else ""
    raise SettingsError(f"store {url!r}: expected {_EXPECTED}{hint}")


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../")) or Path(text).is_dir()


def _redacted(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _open_folder(parts: SplitResult, *, url: str, must_exist: bool) -> ObjectStore:
    host = parts.netloc
    path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))  # a name is bytes, not text
    if host not in {"", "localhost"} or not path.startswith("/"):
        raise SettingsError(f"store {url}: write a folder as file:///absolute/path")
    return FolderStore(Path(path), must_exist=must_exist)


def _open_s3(
    bucket: str, prefix: str, options: S3Options, policy: RetryPolicy | None
) -> ObjectStore:
    if prefix:
        try:
            check_key(prefix)
        except InvalidKey as error:
            raise SettingsError(f"store s3://{bucket}/{prefix}: {error}") from error
    # boto3 takes a quarter of a second to import, which users of a folder need not wait for.
    from tierlog.object_store.s3 import S3Store

    return S3Store(bucket, prefix, options, policy=policy)
